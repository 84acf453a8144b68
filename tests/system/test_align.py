"""`transduce align` and guided alignment, on text whose words are known to belong together."""

import random
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from system.commands import assert_refused, small, succeed, transduce
from system.teams import assert_resumes_exactly
from transduce import DecodingOptions, Translator
from transduce.config.settings import Settings
from transduce.data.store import AlignedStore
from transduce.distillation.distill import text_settings
from transduce.errors import SettingsError
from transduce.logging import Log
from transduce.runs.folder import RunFolder
from transduce.tasks.base import open_prepared
from transduce.tasks.resolve import check, find_task
from transduce.text.special import PLACEHOLDER_IDS

SYLLABLES = ["ba", "du", "ke", "lo", "mi", "nu", "po", "ra", "si", "tu"]


def write_text(folder: Path, name: str, n: int, *, seed: int) -> None:
    """Words, and in reverse order the same words spelled backwards; the first word has no counterpart."""
    draw = random.Random(seed)
    lines: dict[str, list[str]] = {"en": [], "de": [], "align": []}
    for _ in range(n):
        words = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 2))) for _ in range(draw.randint(2, 5))]
        lines["en"].append(" ".join(["so", *words]))
        lines["de"].append(" ".join(word[::-1] for word in reversed(words)))
        lines["align"].append(" ".join(f"{i + 1}-{len(words) - 1 - i}" for i in range(len(words))))
    for side, texts in lines.items():
        (folder / f"{name}.{side}").write_text("".join(f"{text}\n" for text in texts))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    write_text(folder, "train", 1500, seed=1)
    write_text(folder, "test", 40, seed=2)
    return folder


def sides(texts: Path, name: str = "test") -> list[object]:
    return ["--src", texts / f"{name}.en", "--tgt", texts / f"{name}.de"]


@pytest.fixture(scope="module")
def run(texts: Path) -> Path:
    """A run that learns the alignment within few updates."""
    settings = small(
        *("training.max_updates=300", "training.valid_updates=150", "training.lr=0.005", "tokenizer.vocab_size=60"),
        *("tokenizer.kind=bpe", "model.n_decoder_layers=2", "training.valid_bleu_sentences=0", "training.average=none"),
        *(f"training.guided_alignment={texts / 'train.align'}", "training.guided_weight=1"),
    )
    succeed("train", *sides(texts, "train"), "--run", texts / "run", *settings)
    return texts / "run"


def error_rate(*arguments: object) -> float:
    done = succeed("align", *arguments)
    (line,) = (line for line in done.err.splitlines() if "AER" in line)
    return float(line.split("AER ")[1].split("%")[0])


def test_a_guided_head_aligns_and_is_the_default(run: Path, texts: Path) -> None:
    gold = ["--gold", texts / "test.align"]
    default = transduce("align", run, *sides(texts), *gold)
    assert default.out == transduce("align", run, *sides(texts), "--method", "guided").out
    assert error_rate(run, *sides(texts), *gold) < 10
    assert len(default.out.splitlines()) == 40
    assert error_rate(run, *sides(texts), *gold, "--method", "leave-out") < 20
    translator = Translator.load(run, device="cpu")
    assert translator.guided_head == (0, 0)
    src, tgt = ((texts / f"test.{side}").read_text().splitlines()[0] for side in ("en", "de"))
    (found,) = translator.align([src], [tgt])
    assert {(src[a:b], tgt[c:d]) for a, b, c, d in found} >= {(w, w[::-1]) for w in src.split()[2:3]}


def test_translations_have_the_links_that_another_pass_finds(run: Path, texts: Path) -> None:
    translator = Translator.load(run, device="cpu")
    srcs = [*(texts / "test.en").read_text().splitlines(), ""]
    for options in (DecodingOptions(beam=1), DecodingOptions(beam=3, n_best=2), DecodingOptions(max_length=3)):
        found = translator.translate(srcs, options)
        # An output may have other tokens than its text, which `align` reads.
        whole = [
            one
            for one in found
            if one.ids and one.finished and list(one.ids) == translator.tokenizers.tgt.encode(one.text)
        ]
        assert options.max_length == 3 or len(whole) > len(found) / 2
        assert [one.candidates[0].attention is not None for one in found] == [bool(one.ids) for one in found]
        picked = [srcs[found.index(one)] for one in whole]
        with patch.object(type(translator.engine), "attention", side_effect=AssertionError("another pass")):
            links = translator.align(picked, whole)
        assert links == translator.align(picked, [one.text for one in whole])
        translator.align(srcs, found)
    (other,) = translator.align(["so ba du ke"], [found[0]])  # a translation of another source: one more pass
    assert other == translator.align(["so ba du ke"], [found[0].text])[0]


def test_symmetrized_with_a_run_for_the_other_direction(run: Path, texts: Path) -> None:
    """The run itself in place of another: the union has the links of both, the intersection those in both."""
    (texts / "one.en").write_text("so ba du\n\n")
    (texts / "one.de").write_text("ud ab\n\n")

    def links(*more: object) -> set[str]:
        done = transduce("align", run, *sides(texts, "one"), *more)
        assert done.code == 0 and done.out.endswith("\n\n")
        return set(done.out.split())

    alone = links()
    reverse = ["--reverse", run, "--symmetrize"]
    intersection, union = links(*reverse, "intersection"), links(*reverse, "union")
    assert intersection <= alone <= union
    assert intersection <= links(*reverse[:2]) <= union


def test_resume_of_guided_alignment_is_bit_identical(texts: Path, tmp_path: Path, processes: ForkServerContext) -> None:
    guided = f"training.guided_alignment={texts / 'train.align'}"
    settings = small("training.max_updates=20", "training.valid_updates=8", guided)
    assert_resumes_exactly(processes, tmp_path, ["train", *sides(texts, "train"), *settings], ("update", 13))


def test_the_links_of_each_pair_are_stored(run: Path, texts: Path, tmp_path: Path) -> None:
    """The stores are gone when a run is finished: encode once more, by the task."""
    settings = RunFolder.open(run).settings
    task, log = find_task("translation"), Log(quiet=True)
    found = task.form.read_texts(settings, log)
    with RunFolder.create(tmp_path / "run", settings, "") as folder:
        prepared = task.prepare(folder, found, Translator.load(run).tokenizers, log)
        opened = open_prepared(task, folder)
    assert isinstance(prepared.train, AlignedStore) and isinstance(opened.train, AlignedStore)
    for i in range(len(prepared.train)):  # placeholders may change the number of words of a pair, which links count
        src, _ = prepared.train[i]
        assert len(prepared.train.links_of(i)) or not set(PLACEHOLDER_IDS).isdisjoint(src.tolist())


def test_a_guided_run_s_text_is_read_again_without_its_links(run: Path, texts: Path) -> None:
    """As `distill` reads it: its own text, or other text."""

    def n_pairs(changes: Mapping[str, Any]) -> int:
        settings = text_settings(RunFolder.open(run), changes)
        return find_task("translation").form.read_texts(settings, Log(quiet=True)).train.size

    (texts / "train.align").rename(texts / "aside")
    try:
        assert n_pairs({}) == 1396
        corpora = [
            {side: texts / f"{name}.{end}" for side, end in (("src", "en"), ("tgt", "de"))}
            for name in ("train", "test")
        ]
        assert n_pairs({"data": {"train": corpora}}) == 1434
    finally:
        (texts / "aside").rename(texts / "train.align")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--gold", "short"], ["the text has 40 lines", "short has 39"]),
        (["--gold", "bad"], ["bad, line 3", "1~1"]),
        (["--gold", "far"], ["far, line 1", "link 0-99"]),
        (["--tgt", "short"], ["test.en has 40 lines", "short has 39"]),
        (["--symmetrize", "union"], ["needs --reverse"]),
        (["--reverse", "RUN", "--symmetrize", "onion"], ["did you mean", "union"]),
        (["--method", "guidde"], ["did you mean", "guided"]),
    ],
    ids=lambda value: " ".join(value[:2]),
)
def test_bad_input(
    arguments: list[str], parts: list[str], run: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(texts)
    lines = Path("test.align").read_text().splitlines()
    for name, changed in (
        ("short", lines[:-1]),
        ("bad", [*lines[:2], "1~1", *lines[3:]]),
        ("far", ["0-99", *lines[1:]]),
    ):
        Path(name).write_text("".join(f"{line}\n" for line in changed))
    given = [str(run) if argument == "RUN" else argument for argument in arguments]
    tgt = [] if "--tgt" in given else ["--tgt", "test.de"]
    assert_refused(transduce("align", run, "--src", "test.en", *tgt, *given), *parts)


def test_runs_of_other_tasks_are_refused(tmp_path: Path, texts: Path) -> None:
    from text_runs import make_run

    assert_refused(transduce("align", make_run(tmp_path / "gpt", kind="gpt"), *sides(texts)), "causal")


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["model.kind=rnn"], ["training.guided_alignment", "needs a Transformer", "'rnn'"]),
        (["tokenizer.sampling=0.1"], ["training.guided_alignment", "tokenizer.sampling"]),
        (["training.guided_alignment=short"], ["short has 1499", "line 1500 has no counterpart"]),
        (["training.guided_alignment=missing"], ["missing"]),
    ],
    ids=" ".join,
)
def test_settings_that_cannot_be_guided_are_refused(settings: list[str], parts: list[str], texts: Path) -> None:
    lines = (texts / "train.align").read_text().splitlines(keepends=True)
    (texts / "short").write_text("".join(lines[:-1]))
    asked = [f"training.guided_alignment={texts / 'train.align'}", *settings]
    asked = [
        value.replace("=short", f"={texts / 'short'}").replace("=missing", f"={texts / 'missing'}") for value in asked
    ]
    sets = [part for value in asked for part in ("--set", value)]
    done = transduce("train", *sides(texts, "train"), "--run", texts / "refused", *sets)
    assert_refused(done, *parts)
    assert not (texts / "refused").exists()


def test_several_corpora_and_other_tasks_have_no_alignment(tmp_path: Path) -> None:
    corpora = [{"src": "a", "tgt": "b"}] * 2
    given = Settings.from_mapping({"data": {"train": corpora}, "training": {"guided_alignment": "x"}})
    with pytest.raises(SettingsError, match="one training corpus"):
        check(given)
