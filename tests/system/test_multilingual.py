"""One model of several languages, trained from text: a token for the target language decides what is written."""

import asyncio
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from marians import make_run
from native_engines import library_missing
from system.commands import assert_refused, sets, succeed, transduce
from transduce import Translator
from transduce.errors import SettingsError
from transduce.metrics_log import MetricsFile
from transduce.runs.folder import RunFolder
from transduce.serving.service import RunSpec, Service
from transduce.text.tokenizer import load_tokenizers

WORDS = ["alba", "bero", "cilo", "dumo", "fane"]
SOURCES = [" ".join(words) for n in (1, 2, 3) for words in itertools.product(WORDS, repeat=n)]
DIRECTIONS = [("en", "de"), ("en", "fr"), ("de", "en"), ("fr", "en")]
MODEL = (
    *("model.d_model=64", "model.d_ff=128", "model.n_heads=4", "model.n_encoder_layers=2", "model.n_decoder_layers=2"),
    *("model.dropout=0.0", "model.residual=pre", "tokenizer.vocab_size=80", "training.optimizer=muon"),
    *("training.lr=0.005", "training.matrix_lr=0.02", "training.batch_tokens=1024", "training.precision=float32"),
    *("training.max_updates=120", "training.valid_updates=60", "training.ema_decay=0.98", "decoding.max_length=16"),
)
RECIPE = """
[data]
languages = "tag"
both_directions = true
temperature = 2
train = [
    { src = "a.en", tgt = "a.de", src_lang = "en", tgt_lang = "deu" },
    { src = "a.en", tgt = "a.fr", src_lang = "en", tgt_lang = "fr" },
]
valid = [
    { src = "v.en", tgt = "v.de", src_lang = "en", tgt_lang = "de" },
    { src = "v.en", tgt = "v.fr", src_lang = "en", tgt_lang = "fr" },
]
test = [{ src = "v.de", tgt = "v.fr", src_lang = "de", tgt_lang = "fr" }]
"""


def in_language(text: str, language: str) -> str:
    """English as it is; German in capitals, French backwards."""
    return {"en": text, "de": text.upper(), "fr": " ".join(reversed(text.split()))}[language]


def write(folder: Path, name: str, texts: Sequence[str]) -> None:
    for language in ("en", "de", "fr"):
        lines = "".join(f"{in_language(text, language)}\n" for text in texts)
        (folder / f"{name}.{language}").write_text(lines, encoding="utf-8")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("languages")
    write(folder, "a", SOURCES * 4)
    write(folder, "v", random.Random(1).sample(SOURCES, 20))
    (folder / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    succeed("train", folder / "recipe.toml", "--run", folder / "run", *sets(*MODEL))
    return folder / "run"


def right(translator: Translator, src: str, tgt: str) -> float:
    texts = SOURCES[5::3]
    found = translator.between(src, tgt).translate([in_language(text, src) for text in texts])
    return sum(in_language(text, tgt) == one.text for text, one in zip(texts, found, strict=True)) / len(texts)


def test_the_token_decides_what_is_written(run: Path) -> None:
    for direction in DIRECTIONS:
        assert right(Translator.load(run), *direction) > 0.9, direction
    texts = SOURCES[5::20]
    expected = [Translator.load(run).between("en", to).translate(texts) for to in ("de", "fr")]
    with library_missing():
        slow = Translator.load(run)
        assert slow.choice.slow_because
        again = [slow.between("en", to).translate(texts) for to in ("de", "fr")]
    assert [[one.ids for one in batch] for batch in again] == [[one.ids for one in batch] for batch in expected]


def test_commands_take_the_languages(run: Path) -> None:
    folder, languages = run.parent, ("--src-lang", "eng", "--tgt-lang", "de-AT")
    done = transduce("translate", run, "bero cilo alba", *languages)
    assert (done.out, done.code) == ("BERO CILO ALBA\n", 0) and "zero-shot" not in done.err
    files = ("--src", folder / "v.en", "--tgt", folder / "v.de")
    to_german, to_french = (
        transduce("score", run, *files, "--src-lang", "en", "--tgt-lang", code).out.split() for code in ("de", "fr")
    )
    assert all(float(a) > float(b) for a, b in zip(to_german, to_french, strict=True)) and len(to_german) == 20
    aligned = transduce("align", run, *files, *languages).out.splitlines()
    links = [link.split("-") for line in aligned for link in line.split()]
    assert len(aligned) == 20 and sum(src == tgt for src, tgt in links) > 0.6 * len(links)
    done = transduce("evaluate", run, "--src", folder / "v.de", "--ref", folder / "v.fr", *_codes("de", "fr"))
    assert "note: zero-shot: the model was not trained from de to fr, only en-de, en-fr, de-en, fr-en" in done.out
    assert "zero-shot" in transduce("translate", run, "BERO CILO", *_codes("de", "fr")).err
    inspected = transduce("inspect", run, "bero cilo", *languages)
    assert "BERO CILO" in inspected.out, inspected.err
    asked = ("translate", run, "bero cilo")
    assert_refused(transduce(*asked, *_codes("en", "dee")), "tgt_lang = 'dee'", "did you mean 'de'")
    assert_refused(transduce(*asked, *_codes("it", "de")), "src_lang = 'it'", "it has de, en, fr")
    pair = ("--src", folder / "v.en", "--ref", folder / "v.de")
    for command in (asked, ("inspect", *asked[1:]), ("align", run, *files), ("evaluate", run, *pair)):
        assert_refused(transduce(*command), "the model has 3 languages: give tgt_lang", "--tgt-lang")


def _codes(src: str, tgt: str) -> tuple[str, ...]:
    return "--src-lang", src, "--tgt-lang", tgt


def test_no_text_contains_a_language_token(run: Path) -> None:
    tokenizers = load_tokenizers(RunFolder.open(run))
    framing = tokenizers.src.framing
    assert dict(zip(framing.languages, tokenizers.src.pieces(framing.languages.values()), strict=True)) == {
        "en": "<2en>",
        "de": "<2de>",
        "fr": "<2fr>",
    }
    src = tokenizers.between("en", "de").src
    for text in ("<2fr> bero", "<2fr>", "bero<2fr>", "</s><2fr><s>"):
        assert framing.ids.isdisjoint(src.encode(text)[1:]) and framing.ids.isdisjoint(
            src.encode_with_offsets(text)[0][1:]
        )
    translation = Translator.load(run).between("en", "de").translate("<2fr> bero cilo")
    assert "<2fr>" in translation.text and "kept as written: <2fr>" in translation.note


def test_scores_are_reported_by_direction(run: Path) -> None:
    names = [f"{a}-{b}" for a, b in DIRECTIONS]
    validations = [event for event in MetricsFile(run / "metrics.jsonl").read() if event["event"] == "validation"]
    assert all(event.keys() >= {f"bleu {name}" for name in names} for event in validations)
    scores = {one["name"]: one["scores"] for one in json.loads((run / "scores.json").read_text())["sets"]}
    assert list(scores) == ["v.de-fr", "v.fr-de"] and all("zero-shot" in one["notes"][0] for one in scores.values())
    card = (run / "README.md").read_text("utf-8")
    assert "A translator for `en-deu, en-fr, deu-en, fr-en`" in card and "--src-lang en --tgt-lang deu" in card
    assert "BLEU de-en" in (run / "report.html").read_text("utf-8")


def test_a_service_routes_by_pair_and_prefers_a_bilingual_run(run: Path) -> None:
    async def answers(*specs: str) -> tuple[list[tuple[str, str, str]], list[str]]:
        service = Service(list(map(RunSpec.parse, specs)))
        await service.start()
        try:
            routes = [(route.name, *route.languages) for route in service.routes]
            pairs = [(route.languages, route) for route in service.routes]
            texts = [
                (await service.translate([in_language("bero cilo", src)], route)).sentences[0].text
                for (src, _), route in pairs
            ]
            return routes, texts
        finally:
            await service.close()

    routes, texts = asyncio.run(answers(str(run)))
    assert routes == [("run", *pair) for pair in DIRECTIONS]
    assert texts == [in_language("bero cilo", tgt) for _, tgt in DIRECTIONS]
    assert asyncio.run(answers(f"en-de={run}", f"de-en={run}"))[0] == [("run", "en", "de"), ("run", "de", "en")]
    single = make_run(run.parent / "single")
    routes, _ = asyncio.run(answers(str(run), f"en-de={single}"))
    assert routes == [("single", "en", "de"), *(("run", *pair) for pair in DIRECTIONS)]
    with pytest.raises(SettingsError, match="translates in one direction"):
        asyncio.run(answers(f"en-de={single}", f"de-en={single}"))


def test_both_directions_first_then_one_is_fine_tuned(run: Path) -> None:
    """Ding et al. 2021: without tokens for languages, a run on both directions initializes one on the wanted."""
    folder = run.parent
    text = ("--src", folder / "a.en", "--tgt", folder / "a.de", "--valid-src", folder / "v.en", "--valid-tgt")
    asked = ("train", *text, folder / "v.de", *_codes("en", "de"), *sets(*MODEL, "training.valid_updates=8"))
    both = sets("data.both_directions=true", "training.max_updates=8")
    succeed(*asked, "--run", folder / "both", *both, says=["1,240 sentence pairs to train on, 40 to validate on"])
    assert not load_tokenizers(RunFolder.open(folder / "both")).src.framing.ids
    one = ("train", *text, folder / "v.de", "--from", folder / "both", "--run", folder / "one")
    done = succeed(
        *one,
        *sets("training.max_updates=8", "training.valid_updates=4", "training.lr=0.003"),
        says=["620 sentence pairs to train on, 20 to validate on"],
    )
    assert "data.src_lang = en" in done.err and not RunFolder.open(folder / "one").settings.data.both_directions
    losses = [event["loss"] for event in MetricsFile(folder / "one" / "metrics.jsonl").read() if "perplexity" in event]
    assert losses[-1] < losses[0]


def test_a_run_of_many_languages_is_fine_tuned_on_more_directions(run: Path) -> None:
    folder = run.parent
    text = ("--src", folder / "a.de", "--tgt", folder / "a.fr", "--valid-src", folder / "v.de", "--valid-tgt")
    asked = ("train", *text, folder / "v.fr", "--from", run, *_codes("de", "fr"), *sets("training.max_updates=2"))
    assert transduce(*asked, "--run", folder / "tuned", *sets("training.valid_updates=2")).code == 0
    tuned = load_tokenizers(RunFolder.open(folder / "tuned")).src
    assert tuned.framing.directions[-1] == ("de", "fr") and len(tuned.framing.directions) == 5
    assert tuned.frame == (tuned.framing.languages["fr"],)
    assert "zero-shot" not in transduce("translate", folder / "tuned", "BERO CILO").err
    refused = ("train", *text, folder / "v.fr", "--from", run, "--run", folder / "no")
    assert_refused(transduce(*refused), "give src_lang and tgt_lang", "--tgt-lang")
    assert_refused(transduce(*refused, *_codes("de", "it")), "tgt_lang = 'it'", "it has de, en, fr")
    assert_refused(
        transduce(*refused, *_codes("de", "fr"), *sets("data.languages=tags")), "data.languages = 'tags'", "'tag'"
    )
    assert not (folder / "no").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("data.languages=none",), ("cannot know whether to write de or fr", "data.languages = 'tag'")),
        (('data.train=[{src="a.en", tgt="a.de"}]',), ("give src_lang and tgt_lang",)),
        (('data.test=[{src="v.de", tgt="v.fr", src_lang="it", tgt_lang="en"}]',), ("src_lang = 'it'", "de, en, fr")),
        (
            (
                'data.valid=[{src="v.de", tgt="v.fr", src_lang="de", tgt_lang="fr"}]',
                'data.monolingual=[{tgt="a.de", model="de-en"}]',
            ),
            ("give src_lang and tgt_lang",),
        ),
        (("data.temperature=0.5",), ("data.temperature", "greater than or equal to 1")),
        (("data.languages=both",), ("data.languages = 'both'", "'tag'")),
    ],
)
def test_texts_that_one_model_cannot_learn_are_refused(
    run: Path, changes: tuple[str, ...], said: tuple[str, ...]
) -> None:
    assert_refused(transduce("train", run.parent / "recipe.toml", "--run", run.parent / "no", *sets(*changes)), *said)
    assert not (run.parent / "no").exists()


@pytest.mark.parametrize("to", ["huggingface", "argos"])
def test_formats_without_language_tokens_are_refused(run: Path, tmp_path: Path, to: str) -> None:
    assert_refused(transduce("export", run, tmp_path / "out", "--to", to), "<2de>", "export --to ctranslate2")


@pytest.mark.slow
def test_the_doctor_checks_a_training_in_many_languages(run: Path) -> None:
    done = transduce("doctor", run.parent / "recipe.toml", *sets(*MODEL, "data.test=[]"))
    assert done.code == 0 and "ready" in done.out, done
