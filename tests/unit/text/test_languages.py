"""Codes of languages as people write them, and the languages of texts."""

import pytest

from transduce.config.settings import TokenizerSettings
from transduce.errors import SettingsError
from transduce.text.languages import (
    base_language,
    find_language,
    guess_languages,
    is_detectable,
    language_name,
    normalize_code,
)
from transduce.text.sentences import split_sentences
from transduce.text.special import Framing
from transduce.text.training import train_tokenizers, with_language_tokens

EN_TO_DE = {"de": 0.5, "en": 1.0}


@pytest.mark.parametrize(
    ("code", "normal", "base"),
    [
        *(("EN", "en", "en"), ("en_GB", "en-gb", "en"), ("pt_BR", "pt-br", "pt"), ("PB", "pt-br", "pt")),
        *(("deu_Latn", "de-latn", "de"), ("fra_Latn", "fr-latn", "fr"), ("jpn_Jpan", "ja-jpan", "ja")),
        *(("fil", "tl", "tl"), ("eng", "en", "en"), ("yue_Hant", "yue-hant", "yue"), ("zho-CN", "zh-hans", "zh")),
        *(
            ("no", "nb", "nb"),
            ("no_NO", "nb-no", "nb"),
            ("NB", "nb", "nb"),
            ("iw", "he", "he"),
            ("IW-il", "he-il", "he"),
        ),
        *(
            ("zt", "zh-hant", "zh"),
            ("zh_Hant", "zh-hant", "zh"),
            ("zh-TW", "zh-hant", "zh"),
            ("zh-CN", "zh-hans", "zh"),
        ),
    ],
)
def test_codes_have_one_form(code: str, normal: str, base: str) -> None:
    assert (normalize_code(code), base_language(code)) == (normal, base)


def test_names_of_languages() -> None:
    names = [language_name(code) for code in ("no", "nb-NO", "iw", "pb", "zt", "xx")]
    assert names == ["Norwegian", "Norwegian", "Hebrew", "Portuguese", "Chinese", "xx"]
    assert [language_name(code) for code in ("deu_Latn", "fra_Latn", "jpn_Jpan")] == ["German", "French", "Japanese"]
    assert is_detectable("deu_Latn") and is_detectable("jpn_Jpan")


def test_sentences_end_alike_under_long_codes() -> None:
    text = "Am 3. Mai kam Dr. Weber. Er ging bald."
    assert split_sentences(text, "deu_Latn") == split_sentences(text, "de") != [text]


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The old doctor sleeps.", "en"), ("A dog runs.", "en"), ("Hello", "en"), ("Thank you", "en"), ("Yes", "en"),
        ("Der alte Arzt schläft.", "de"), ("Guten Tag", "de"), ("Nein", "de"),
        ("Le vieux médecin dort.", "fr"), ("Bonjour le monde", "fr"), ("¿Cómo estás?", "es"), ("你好", "zh"),
        ("猫が走る。", "ja"), ("Старый врач спит.", "ru"), ("Ο γιατρός κοιμάται.", "el"), ("הרופא ישן.", "he"),
        ("ឆ្កែធំឃើញសៀវភៅ", "km"), ("ໝາໃຫຍ່", "lo"), ("ලොකු බල්ලා", "si"), ("ခွေးကြီး", "my"), ("ትልቅ ውሻ", "am"),
        ("ദൊക", "ml"), ("iPhone ಮತ್ತು ಪುಸ್ತಕ 5", "kn"), ("The dog ឆ្កែ runs.", "en"),
        ('<p class="the quick container"><b>Der alte Arzt schläft.</b></p> https://the.example/has/words', "de"),
    ],
)  # fmt: skip
def test_the_language_of_a_text_is_one_of_all(text: str, language: str) -> None:
    (guess,) = guess_languages([text], EN_TO_DE)
    assert next(iter(guess)) == language and sum(guess.values()) == pytest.approx(1)


@pytest.mark.parametrize("text", ["", " ", "123", "😀", "1,000.50 %", "***", "<br/>", "https://example.org/the/page"])
def test_a_text_without_words_has_no_language(text: str) -> None:
    assert guess_languages([text], EN_TO_DE) == [{}]


def test_texts_are_evidence_for_each_other() -> None:
    expected = {"nl": 1.0, "de": 1.0}
    (alone,) = guess_languages(["Hallo!"], expected)
    for code, text in (("de", "Der alte Arzt schläft nicht."), ("nl", "De oude dokter slaapt niet.")):
        beside, other, number = guess_languages(["Hallo!", text, "123"], expected)
        assert beside[code] > alone[code] and next(iter(beside)) == next(iter(other)) == code and not number
    mixed = guess_languages(["Der alte Arzt schläft nicht.", "The old doctor does not sleep."], {"en": 1.0, "de": 1.0})
    assert [next(iter(guess)) for guess in mixed] == ["de", "en"]


def test_languages_that_cannot_be_detected() -> None:
    assert [is_detectable(code) for code in ("no", "zh_Hant", "fo", "src")] == [True, True, False, False]
    (guess,) = guess_languages(["The old doctor sleeps."], {"fo": 1.0})
    assert next(iter(guess)) == "en"


def test_a_script_that_the_detector_lacks_tells_the_language() -> None:
    assert is_detectable("lao_Laoo") and is_detectable("tir") and not is_detectable("")
    assert guess_languages(["ትልቅ ውሻ", "A dog runs."], {"en": 1.0, "ti_ET": 1.0})[0] == {"ti_ET": 1.0}


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
