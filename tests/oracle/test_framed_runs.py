"""A run whose texts begin with tokens of languages, in everything that reads, scores, aligns or serves texts."""

import asyncio
import json
from pathlib import Path

import pytest

from oracle import quiet_transformers  # noqa: F401  skips this module without transformers
from seq2seqs import write_model
from transduce.bulk.translate import translate_to_folder
from transduce.config.settings import DataSettings
from transduce.convert import seq2seq_vocabulary
from transduce.convert.importing import import_run
from transduce.data.encoding import _token_links
from transduce.data.pairs import Pair
from transduce.data.store import Example
from transduce.decoding.alignment import Alignment
from transduce.decoding.translator import Translator
from transduce.errors import DataError, SettingsError
from transduce.inspection.inspection import inspect
from transduce.runs.folder import RunFolder
from transduce.serving.access import Admission, Limits
from transduce.serving.async_models import AsyncTranslator
from transduce.serving.service import RunSpec, Service
from transduce.text.special import Framing
from transduce.text.tokenizer import Tokenizers

TEXTS = ["a man .", "two dogs run ."]
LANGS = ["de", "zh_Hant"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("framed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seq2seq_vocabulary, "_MOST_MISSING", 1.0)
        write_model(folder / "theirs", "nllb", 4, max_position_embeddings=64)
        list(import_run(folder / "theirs", folder / "run"))
    return folder / "run"


@pytest.fixture(scope="module")
def translator(run: Path) -> Translator:
    return Translator.load(run).between("en", "de")


def test_a_bulk_translation_between_named_languages_resumes(run: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "a.txt", tmp_path / "out"
    source.write_text("\n".join(TEXTS) + "\n")
    for _ in range(2):
        translate_to_folder(run, [source], out, languages=("en", "de"), beam=1, max_length=8)
    header = json.loads((out / ".transduce" / "a.txt.journal").read_text().splitlines()[0])
    assert header["languages"] == ["en", "de"]
    with pytest.raises(DataError, match="languages"):
        translate_to_folder(run, [source], out, languages=("en", "zh"), beam=1, max_length=8)


def test_language_tokens_belong_to_no_word(translator: Translator) -> None:
    pair = Alignment.read(translator.tokenizers, *TEXTS)
    for side in (pair.src, pair.tgt):
        assert side.owners[0] == -1 and side.owners[1] == 0 and len(side.owners) == len(side.ids)
    links = _token_links(Pair("man", "man", "a.txt", 1, links="0-0"), translator.tokenizers)
    n_src = len(translator.tokenizers.src.encode("man"))
    by_target: dict[int, list[int]] = {}
    for src, tgt in zip(links[::2], links[1::2], strict=True):
        by_target.setdefault(tgt, []).append(src)
    assert by_target.pop(0) == [n_src]  # the end of the source
    assert all(tokens == list(range(1, n_src)) for tokens in by_target.values()) and by_target


def test_scores_leave_out_language_tokens(translator: Translator) -> None:
    src, tgt = translator.tokenizers.src.encode(TEXTS[0]), translator.tokenizers.tgt.encode(TEXTS[1])
    frame = tgt[:1]
    raw = translator.engine.score([Example(src, tgt), Example(src, frame)])
    full, empty = translator.score([TEXTS[0]] * 2, [TEXTS[1], ""])
    assert full.token_log_probs == pytest.approx(raw[0][1:]) and full.n_tokens == len(tgt)
    assert empty.token_log_probs == pytest.approx(raw[1][1:]) and empty.log_prob < 0

    async def scored() -> list[float]:
        served = AsyncTranslator(translator, Admission(Limits()))
        try:
            return [score.log_prob for score in await served.score([TEXTS[0]] * 2, [tgt, frame])]
        finally:
            await served.close()

    assert asyncio.run(scored()) == pytest.approx([full.log_prob, empty.log_prob])


def test_inspection_shows_the_translation(translator: Translator) -> None:
    for text in TEXTS:
        translation = translator.translate(text)
        inspection = inspect(translator, text)
        assert inspection.sentence.sides["tgt_out"].text == translation.text
        search = inspection.sentence.search
        assert search is not None and search.results[0].ids == translation.ids
        assert search.results[0].log_prob == pytest.approx(translation.log_prob, abs=1e-4)
        src = inspection.sentence.sides["src"]
        assert src.words[:2] == (0, 1) and src.word_texts[:2] == ("eng_Latn", text.split()[0])


def test_pairs_are_served(run: Path, translator: Translator) -> None:
    async def served(*specs: str) -> tuple[list[str], list[str]]:
        service = Service(list(map(RunSpec.parse, specs)))
        await service.start()
        try:
            pairs = ["-".join(route.languages) for route in service.routes]
            texts = [(await service.translate([TEXTS[0]], service.route("eng", to))).sentences[0].text for to in LANGS]
            return pairs, texts
        finally:
            await service.close()

    expected = [translator.between(tgt_lang=language).translate(TEXTS[0]).text for language in LANGS]
    named = [f"en-{language}={run}" for language in LANGS]
    assert asyncio.run(served(*named)) == ([f"en-{language}" for language in LANGS], expected)
    pairs, texts = asyncio.run(served(str(run)))
    assert len(pairs) == 20 and {"en-de", "de-en", "ace-zh", "ace-zh-hant"} <= {*pairs} and texts == expected
    with pytest.raises(SettingsError, match="tgt_lang = 'xx': the model has no such language"):
        asyncio.run(served(f"en-xx={run}"))


def test_languages_that_are_needed_are_asked_for(run: Path) -> None:
    loaded = Translator.load(run)
    unchosen = Translator(loaded.engine, loaded.tokenizers)
    with pytest.raises(SettingsError, match="the model has 5 languages: give src_lang and tgt_lang") as caught:
        unchosen.between()
    assert caught.value.names == ("data.src_lang", "data.tgt_lang")
    with pytest.raises(SettingsError, match=r"give src_lang$"):
        unchosen.between(tgt_lang="de")
    assert unchosen.between("en", "de").between(tgt_lang="zh").languages == ("en", "zh")


def test_a_bilingual_run_refuses_only_languages_other_than_its_own(translator: Translator) -> None:
    vocabulary = translator.tokenizers.src.with_framing(Framing())
    tokenizers = Tokenizers(vocabulary, vocabulary)
    assert Translator(translator.engine, tokenizers).between("en", "de").languages == ("en", "de")
    named = Translator(translator.engine, tokenizers, data=DataSettings(src_lang="en", tgt_lang="de"))
    assert named.between("eng_Latn").languages == ("eng_Latn", "de")
    with pytest.raises(SettingsError, match=r"src_lang = 'fr'.*it has en"):
        named.between("fr")


def test_the_digest_of_a_model_depends_on_its_languages(run: Path) -> None:
    folder = RunFolder.open(run)
    before = folder.model_digest()
    folder.settings = folder.settings.with_values("data", tgt_lang="deu_Latn")
    assert before == RunFolder.open(run).model_digest() != folder.model_digest()


def test_the_card_tells_how_to_choose_languages(run: Path) -> None:
    card = (run / "README.md").read_text()
    assert "A translator between 5 languages" in card and "--src-lang en --tgt-lang de" in card


@pytest.mark.usefixtures("few_pieces")
def test_a_forced_language_is_not_reported_as_ignored(tmp_path: Path) -> None:
    model = write_model(tmp_path / "theirs", "nllb", 4, max_position_embeddings=64)
    path = tmp_path / "theirs" / "generation_config.json"
    for forced, is_ignored in ((model.config.vocab_size - 2, False), (5, True)):
        tokens = json.loads((tmp_path / "theirs" / "tokenizer.json").read_text())["added_tokens"]
        forced = next(token["id"] for token in tokens if token["content"] == "deu_Latn") if not is_ignored else forced
        path.write_text(json.dumps(json.loads(path.read_text()) | {"forced_bos_token_id": forced}))
        lines = list(import_run(tmp_path / "theirs", tmp_path / f"run{forced}"))
        assert any("forced_bos_token_id" in line for line in lines) is is_ignored
