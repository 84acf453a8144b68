"""Bad input: a one-line error, exit code 2, no partial results, nothing lost."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from system.commands import Done, assert_refused, sets, small, transduce, write_corpus
from transduce.runs.folder import RunFolder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    write_corpus(folder, "train", 60)
    write_corpus(folder, "test", 6, split="test")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    src, tgt = write_corpus(folder, "train", 60)
    done = transduce("train", "--src", src, "--tgt", tgt, "--run", folder / "run", *small())
    assert done.code == 0, done.err
    return folder


def train(texts: Path, *more: object) -> Done:
    sides = ["--src", texts / "train.en", "--tgt", texts / "train.de"]
    return transduce("train", *sides, "--run", texts.parent / "run", "--quiet", *small(), *more)


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (lambda en, de: (en, de[:41]), ["train.en has 60 lines", "train.de has 41", "line 42"]),
        (lambda en, de: (en, [*de[:16], b"Gr\xfc\xdfe\n", *de[17:]]), ["train.de, line 17: not valid UTF-8", "0xfc"]),
        (lambda en, de: ([], []), ["no sentence pair found"]),
        (lambda en, de: (en, [b"\n"] * 60), ["no sentence pair", "60", "empty"]),
        (lambda en, de: (en[:1], de[:1]), ["one sentence pair"]),
    ],
    ids=["shorter", "not UTF-8", "empty", "blank", "one pair"],
)
def test_bad_text(spoil: Callable[..., tuple[list[bytes], list[bytes]]], parts: list[str], texts: Path) -> None:
    files = texts / "train.en", texts / "train.de"
    sides = [file.read_bytes().splitlines(keepends=True) for file in files]
    for file, lines in zip(files, spoil(*sides), strict=True):
        file.write_bytes(b"".join(lines))
    assert_refused(train(texts), *parts)
    assert not (texts.parent / "run").exists()


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["model.droput=0.1"], ["unknown key 'model.droput'; did you mean 'dropout'?"]),
        (["training.lr=-1"], ["training.lr", "greater than 0"]),
        (["model.preset=tinny"], ["model.preset = 'tinny'; did you mean 'tiny'?"]),
        (["training.optimizer=adamm"], ["training.optimizer = 'adamm'; did you mean 'adam", "allowed: adam"]),
        (["training.schedule=cosin"], ["training.schedule = 'cosin'", "cosine"]),
        (["training.device=gpu"], ["training.device = 'gpu': allowed are auto, cpu and cuda"]),
        (["evaluation.tokenize=13b"], ["13b", "13a"]),
        (["tokenizer.normalization=nfd"], ["tokenizer.normalization = 'nfd'", "'nfkc_cf' or 'identity'"]),
        (["tokenizer.vocab_size=20"], ["tokenizer.vocab_size = 20", "characters"]),
        (["data.max_length=1"], ["no sentence pair", "too long", "raise data.max_length"]),
        (["model.positions=learned", "model.max_positions=10"], ["model.max_positions = 10", "at least 257"]),
        (["tokenizer.joint=false", "model.tie=three_way"], ["three_way", "tokenizer.joint"]),
        (["data.demo=100"], ["data.demo = 100", "leave one of them out"]),
        (["data.train=3"], ["data.train = 3", "should be a list"]),
        (["model.d_model=100000000"], ["model.d_model = 100000000", "less than or equal to"]),
        (["training.seed=99999999999999999999999"], ["training.seed", "less than or equal to"]),
        (["tokenizer.vocab_size=99999999999999"], ["tokenizer.vocab_size", "less than or equal to"]),
        (["tokenizer.character_coverage=0.95"], ["tokenizer.character_coverage = 0.95", "0.98"]),
        (["decoding.length_penalty=1000"], ["decoding.length_penalty = 1000", "less than or equal to 10"]),
        (["decoding.beam=1000000"], ["decoding.beam = 1000000", "less than or equal to"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_bad_settings(settings: list[str], parts: list[str], texts: Path) -> None:
    assert_refused(train(texts, *sets(*settings)), *parts)
    assert not (texts.parent / "run").exists()


def test_a_vocabulary_too_large_for_the_text_is_reduced(texts: Path) -> None:
    sides = ["--src", texts / "train.en", "--tgt", texts / "train.de"]
    done = transduce("train", *sides, "--run", texts.parent / "run", *small("tokenizer.vocab_size=100000"))
    assert done.code == 0, done.err
    assert "pieces instead of 100,000" in done.err
    size = RunFolder.open(texts.parent / "run").settings.tokenizer.vocab_size
    assert size is not None and size < 3000


def test_leaked_test_pairs_are_counted_in_a_warning(texts: Path) -> None:
    leaked = [(texts / f"train.{side}").read_text(encoding="utf-8").splitlines(keepends=True) for side in ("en", "de")]
    for side, lines in (("en", map(str.upper, leaked[0][:4])), ("de", [*leaked[1][:3], "Another translation.\n"])):
        with (texts / f"test.{side}").open("a", encoding="utf-8") as file:
            file.writelines(lines)
    done = train(texts, "--test-src", texts / "test.en", "--test-tgt", texts / "test.de", "--valid-src",
                 texts / "test.en", "--valid-tgt", texts / "test.de")  # fmt: skip
    assert done.code == 0, done.err
    assert "warning: test: 3 of 10 pairs" in done.err and "1 of 10 sources" in done.err
    report = json.loads((texts.parent / "run" / "data.json").read_text())
    assert [leak["leaked"] for leak in report["leaks"]] == [3, 3]
    assert "overlap with the training text" in (texts.parent / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["translate", "RUN", "no.en"], ["cannot read no.en: No such file"]),
        (["translate", "RUN", "latin1.en"], ["latin1.en, line 2: not valid UTF-8"]),
        (["translate", "RUN", "."], [". is a folder; name a text file"]),
        (["translate", "RUN", "train.en", "--beam", "2", "--nbest", "3"], ["n_best = 3", "beam = 2"]),
        (
            ["translate", "RUN", "train.en", "-o", "no/where.de"],
            ["cannot write no/where.de: No such file or directory"],
        ),
        (["translate", "RUN", "train.en", "-o", "."], ["--output . is a folder; name a file"]),
        (["translate", "RUN", "no.en", "train.en", "-o", "run/../train.en"], ["--output run/../train.en is also"]),
        (
            ["translate", "RUN", "train.en", "--prefix", "train.de", "-o", "train.de"],
            ["--output train.de is also an input"],
        ),
        (
            ["evaluate", "RUN", "--src", "train.en", "--ref", "train.de", "-o", "train.de"],
            ["--output train.de is also an input"],
        ),
        (["translate", "RUN", "train.en", "--length-penalty", "1000"], ["length_penalty = 1000.0", "10"]),
        (["translate", "RUN", "train.en", "--max-length", "9" * 21], ["max_length = 9", "1000000"]),
        (["translate", "RUN", "train.en", "--beam", "5000"], ["beam = 5000", "512"]),
        (["translate", "RUN", "train.en", "--top-k", "3"], ["top_k: no effect on a search", "--sample"]),
        (["translate", "RUN", "train.en", "--sample", "--beam", "3"], ["beam", "no effect on samples"]),
        (["translate", "RUN", "train.en", "--device", "tpu"], ["device = 'tpu': allowed are auto, cpu and cuda"]),
        (["evaluate", "RUN", "--src", "train.en", "--ref", "latin1.en"], ["latin1.en, line 2"]),
        (["evaluate", "RUN", "--src", "train.en", "--ref", "two.de"], ["train.en has 60 lines", "two.de has 2"]),
        (
            ["evaluate", "RUN", "--src", "train.en", "--ref", "train.de", "--hyp", "two.de"],
            ["2 lines of two.de but 60 references"],
        ),
        (["evaluate", "RUN", "--src", "train.en", "--ref", "train.de", "--tokenize", "nonne"], ["nonne", "none"]),
        (
            ["evaluate", "RUN", "--src", "train.en", "--ref", "train.de", "--stride", "4"],
            ["--stride: no effect", "'translation'"],
        ),
        (
            ["evaluate", "RUN", "--src", "train.en", "--ref", "train.de", "--hyp", "train.de", "--beam", "7"],
            ["beam: no effect if hyp gives"],
        ),
        (["score", "RUN", "--src", "train.en", "--tgt", "two.de"], ["train.en has 60 lines", "two.de has 2"]),
    ],
    ids=lambda value: " ".join(value[2:4]) if value[0] in ("translate", "evaluate", "score") else "",
)
def test_bad_input_of_a_finished_run(
    arguments: list[str], parts: list[str], trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    (trained / "latin1.en").write_bytes(b"fine\ncaf\xe9\n")
    (trained / "two.de").write_text("eins\nzwei\n")
    done = transduce(*(str(trained / "run") if argument == "RUN" else argument for argument in arguments))
    assert_refused(done, *parts)


def test_the_folder_of_another_run_is_not_changed(trained: Path) -> None:
    before = {path: path.read_bytes() for path in (trained / "run").rglob("*") if path.is_file()}
    sides = ["--src", trained / "train.en", "--tgt", trained / "train.de", "--run", trained / "run"]
    done = transduce("train", *sides, *small("training.seed=2"))
    assert_refused(done, "another run: training.seed is 1 in the folder and 2 here", "--run")
    assert {path: path.read_bytes() for path in (trained / "run").rglob("*") if path.is_file()} == before


def test_a_sentence_longer_than_training_saw_is_translated_with_a_warning(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "long.en").write_text("dog " * 700 + "\nA dog.\n")
    done = transduce("translate", trained / "run", tmp_path / "long.en", "--max-length", "5")
    assert done.code == 0 and done.out.count("\n") == 2
    assert "warning: line 1:" in done.err and "256" in done.err


def test_an_untranslated_line_is_always_reported(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "in.en").write_text("A dog runs.\n" * 9 + "dog " * 30_000 + "\n")
    done = transduce("translate", trained / "run", tmp_path / "in.en", "--max-length", "1", "--beam", "1")
    assert done.code == 0 and done.out.count("\n") == 10
    assert "line 10: not translated" in done.err


def test_divergence_is_a_one_line_error(texts: Path) -> None:
    done = train(texts, *sets("training.optimizer=adam", "training.lr=1e30", "training.warmup_updates=0"))
    assert done.code == 1 and "Traceback" not in done.err
    assert "not finite" in done.err.splitlines()[-1], done.err


def test_a_finished_run_without_its_log_is_reported(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run)
    (run / "metrics.jsonl").write_text("")
    sides = ["--src", trained / "train.en", "--tgt", trained / "train.de"]
    assert_refused(
        transduce("train", *sides, "--run", run, "-q", *small()), "metrics.jsonl is damaged", "model can be used"
    )


def test_damaged_text_of_a_run_that_was_killed_before_it_was_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, tgt = write_corpus(tmp_path, "train", 60)
    asked = ["train", "--src", src, "--tgt", tgt, "--run", tmp_path / "run", "-q", *small("training.max_updates=2")]
    with monkeypatch.context() as patch:
        patch.setattr("transduce.pipeline.finalize", mock.Mock(side_effect=KeyboardInterrupt))
        assert transduce(*asked).code == 130
    file = tmp_path / "run" / "tokens" / "valid" / "src.npy"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert_refused(transduce(*asked), "src.npy")
    file.write_bytes(content)
    assert transduce(*asked).code == 0


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="no limits on files here")
def test_a_full_disk_is_reported_and_the_last_good_state_stays(texts: Path) -> None:
    """A limit on file sizes simulates the full disk: writing fails in the same place."""
    run = texts.parent / "run"
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)\n"
        "from transduce.__main__ import main\n"
        "main()"
    )
    sides = ["--src", texts / "train.en", "--tgt", texts / "train.de", "--run", run]
    options = small("training.max_updates=6", "training.valid_updates=2")

    def start(limit: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, str(limit), "train", *map(str, sides), *options]
        return subprocess.run(command, capture_output=True, text=True)

    full = start(100_000)  # enough for the vocabulary, not for weights and checkpoints
    assert full.returncode == 2, full.stderr
    last = full.stderr.splitlines()[-1]
    assert last.startswith("transduce: error: cannot write ") and "File too large" in last, full.stderr
    assert "Traceback" not in full.stderr
    assert not [path for path in run.rglob("*") if "aside" in path.name], "what was half written is gone"
    enough = start(100_000_000)
    assert enough.returncode == 0, enough.stderr
    assert RunFolder.open(run).load_model()
