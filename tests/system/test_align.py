"""`transduce align` and guided alignment, on text whose words are known to belong together."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest

from system.commands import Done, assert_refused, small, transduce
from transduce import DecodingOptions, Translator
from transduce.config.settings import Settings
from transduce.data.store import AlignedStore
from transduce.errors import SettingsError
from transduce.logging import Log
from transduce.runs.folder import RunFolder
from transduce.tasks.registry import find_task
from transduce.verification.resume import verify_resume

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
    done = transduce("train", *sides(texts, "train"), "--run", texts / "run", *settings)
    assert done.code == 0, done.err
    return texts / "run"


def error_rate(*arguments: object) -> float:
    done = transduce("align", *arguments)
    assert done.code == 0, done.err
    (line,) = (line for line in done.err.splitlines() if "AER" in line)
    return float(line.split("AER ")[1].split("%")[0])


def test_a_guided_head_aligns_and_is_the_default(run: Path, texts: Path) -> None:
    gold = ["--gold", texts / "test.align"]
    default = transduce("align", run, *sides(texts), *gold)
    assert default.out == transduce("align", run, *sides(texts), "--method", "guided").out
    assert error_rate(run, *sides(texts), *gold) < 10
    assert len(default.out.splitlines()) == 40
    for method, worst in (("attention", 75), ("leave-out", 20)):
        assert error_rate(run, *sides(texts), *gold, "--method", method) < worst
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


def test_resume_of_guided_alignment_is_bit_identical(run: Path) -> None:
    settings = RunFolder.open(run).settings
    same, _ = verify_resume(run, settings, updates=40, kills=2, seed=1, log=Log(quiet=True))
    assert same


def test_the_links_of_each_pair_are_stored(run: Path, texts: Path, tmp_path: Path) -> None:
    """The stores are gone when a run is finished: encode once more, by the task."""
    settings = RunFolder.open(run).settings
    task, log = find_task("translation"), Log(quiet=True)
    found = task.read(settings, log)
    with RunFolder.create(tmp_path / "run", settings, "") as folder:
        prepared = task.encode(folder, found, Translator.load(run).tokenizers, settings, log)
        opened = task.open_prepared(folder)
    assert isinstance(prepared.train, AlignedStore) and isinstance(opened.train, AlignedStore)
    assert all(len(prepared.train.links_of(i)) for i in range(len(prepared.train)))


def test_a_guided_run_s_text_is_read_again_without_its_links(run: Path, texts: Path, tmp_path: Path) -> None:
    """By `shortlist` and `distill`: its own text, moved without the links, or other text."""
    shutil.copytree(run, tmp_path / "run")
    for side in ("en", "de"):
        shutil.copy(texts / f"train.{side}", tmp_path)

    def shortlist(*options: object) -> Done:
        return transduce("shortlist", tmp_path / "run", "--n-best", 2, "--max-loss", 100, *options)

    own = shortlist("--data", tmp_path)
    assert own.code == 0 and "from 1,484 of 1,484 sentence pairs" in own.err, own.err
    (texts / "train.align").rename(texts / "aside")
    try:
        assert shortlist("--data", tmp_path) == own
    finally:
        (texts / "aside").rename(texts / "train.align")
    corpora = ", ".join(f'{{src="{texts}/{name}.en", tgt="{texts}/{name}.de"}}' for name in ("train", "test"))
    done = shortlist("--set", f"data.train=[{corpora}]")
    assert done.code == 0 and "from 1,524 of 1,524 sentence pairs" in done.err, done.err
    for side in ("en", "de"):
        (tmp_path / f"train.{side}").write_text("so ba\nso du\n")
    done = shortlist("--data", tmp_path)
    assert done.code == 2 and "has changed since its training" in done.err, done.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--gold", "short"], ["the text has 40 lines", "short has 39"]),
        (["--gold", "bad"], ["bad, line 3", "1~1"]),
        (["--gold", "far"], ["far, line 1", "link 0-99"]),
        (["--tgt", "short"], ["test.en has 40 lines", "short has 39"]),
        (["--symmetrize", "union"], ["needs --reverse"]),
        (["--reverse", "RUN", "--symmetrize", "onion"], ["did you mean", "union"]),
        (["--method", "attentoin"], ["did you mean", "attention"]),
        (["--method", "attention", "--layer", "7"], ["layers 1 to 2"]),
        (["--layer", "1"], ["only for --method attention"]),
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
        find_task("translation").check(given, given.model)
