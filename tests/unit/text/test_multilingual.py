"""Language codes as people write them."""

from __future__ import annotations

import pytest

from transduce.config.settings import TokenizerSettings
from transduce.errors import SettingsError
from transduce.text.languages import find_language
from transduce.text.special import Framing
from transduce.text.training import train_tokenizers, with_language_tokens

NLLB = (
    "eng_Latn",
    "fra_Latn",
    "deu_Latn",
    "zho_Hans",
    "zho_Hant",
    "arb_Arab",
    "arb_Latn",
    "pes_Arab",
    "srp_Cyrl",
    "nob_Latn",
)
M2M = ("en", "fr", "de", "zh", "ar", "fa", "ns", "pt")
MBART = ("en_XX", "fr_XX", "zh_CN", "pt_XX", "fa_IR")


@pytest.mark.parametrize(
    ("code", "known", "expected"),
    [
        ("fr", NLLB, "fra_Latn"), ("fra", NLLB, "fra_Latn"), ("fre", NLLB, "fra_Latn"), ("FR-ca", NLLB, "fra_Latn"),
        ("zh", NLLB, "zho_Hans"), ("zh-TW", NLLB, "zho_Hant"), ("zh-Hant-HK", NLLB, "zho_Hant"),
        ("cmn", NLLB, "zho_Hans"),
        ("ar", NLLB, "arb_Arab"), ("ar-Latn", NLLB, "arb_Latn"), ("fa", NLLB, "pes_Arab"), ("no", NLLB, "nob_Latn"),
        ("sr", NLLB, "srp_Cyrl"), ("__de__", NLLB, "deu_Latn"), ("deu_Latn", M2M, "de"), ("zh-Hant", M2M, "zh"),
        ("nso", M2M, "ns"), ("pt-BR", M2M, "pt"), ("pt_BR", MBART, "pt_XX"), ("fas", MBART, "fa_IR"),
        ("en", MBART, "en_XX"),
    ],
)  # fmt: skip
def test_a_code_finds_the_language_of_the_model(code: str, known: tuple[str, ...], expected: str) -> None:
    assert find_language(code, known, name="src_lang") == expected


@pytest.mark.parametrize(
    ("code", "known", "said"),
    [
        ("zh-Hant", MBART, "did you mean 'zh_CN'"),
        ("fra_Latm", NLLB, "'fra_Latn'"),
        ("xx", M2M, "it has ar, de"),
    ],
)
def test_a_language_that_the_model_lacks_is_refused_with_the_nearest(
    code: str, known: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SettingsError, match="tgt_lang") as caught:
        find_language(code, known, name="tgt_lang")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_framing_gives_the_ids_of_the_languages_on_both_sides() -> None:
    languages = {"en": 7, "de": 8}
    assert Framing(languages, ("src",), ("tgt",)).between("eng", "de-AT") == ((7,), (8,))
    assert Framing(languages, ("tgt",)).between("anything", "de") == ((8,), ())
    assert Framing({}, (4,), (4,)).between("src", "tgt") == ((4,), (4,))


def test_directions_of_a_training_are_known() -> None:
    trained = Framing({"en": 4, "de": 5, "fr": 6}, ("tgt",), (), (("en", "fr"), ("en", "de")))
    assert trained.pairs() == (("en", "fr"), ("en", "de"))
    assert trained.is_zero_shot("de", "fr") and not trained.is_zero_shot("eng", "de-AT")
    assert not trained.is_zero_shot(None, "de")
    assert trained.trained_on([("deu", "fr"), ("en", "de")]).directions == (*trained.directions, ("de", "fr"))
    assert Framing.from_json(trained.to_json(), n_ids=7) == trained
    with pytest.raises(SettingsError, match="src_lang = 'it'"):
        trained.between("it", "de")
    imported = Framing(dict.fromkeys(NLLB, 4), ("src",), ("tgt",))
    assert imported.trained_on([("en", "de")]) == imported and not imported.is_zero_shot("en", "de")
    assert len(imported.pairs()) == 90
    codes = imported.usual_codes()
    assert [codes[code] for code in NLLB] == ["en", "fr", "de", "zh", "zh-hant", "ar", "ar-latn", "fa", "sr", "nb"]
    assert all(find_language(codes[code], NLLB, name="src_lang") == code for code in NLLB)


@pytest.mark.parametrize("written", ["<2de>", "<2de> <2fr>", "a<2de>b"])
def test_a_vocabulary_may_have_learned_pieces_like_language_tokens(written: str) -> None:
    lines = [f"{written} the dog {n}" for n in range(60)]
    plain = train_tokenizers(lines, lines, TokenizerSettings(kind="bpe"), vocab_size=60)
    both = with_language_tokens(plain, [("en", "de")], src=("tgt",))
    tokens = both.src.pieces(both.src.framing.ids)
    assert len({*tokens}) == 2 and both.src.framing.ids.isdisjoint(plain.src.encode(written))
    assert both.between(None, "de").src.encode(written)[1:] == plain.src.encode(written)
    assert both.src.decode([*both.src.framing.ids, *plain.src.encode("the dog")]) == "the dog"


def test_a_damaged_framing_is_refused() -> None:
    framing = Framing({"en": 7}, ("src",), (5,))
    assert Framing.from_json(framing.to_json(), n_ids=8) == framing
    for wrong in (
        {},
        [],
        framing.to_json() | {"src": ["other"]},
        framing.to_json() | {"languages": {"en": "7"}},
        framing.to_json() | {"directions": [["en", "de"]]},
    ):
        with pytest.raises(ValueError, match="framing"):
            Framing.from_json(wrong, n_ids=8)
    with pytest.raises(ValueError, match="framing"):
        Framing.from_json(framing.to_json(), n_ids=7)


def test_an_error_lists_twenty_languages_at_most() -> None:
    known = [f"q{a}{b}" for a in "abcde" for b in "abcde"]
    with pytest.raises(SettingsError, match=r"qde and 5 more$") as caught:
        find_language("xx", known, name="src_lang")
    assert caught.value.names == ("data.src_lang",)


@pytest.mark.parametrize("directions", [5, None, [5], [["en"]], [["en", "xx"]]])
def test_damaged_directions_are_refused(directions: object) -> None:
    content = {"languages": {"en": 5, "de": 6}, "src": ["tgt"], "tgt": [], "directions": directions}
    with pytest.raises(ValueError, match=r"framing|unpack"):
        Framing.from_json(content, n_ids=10)
