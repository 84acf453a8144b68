"""The examples of docs/vision.md and docs/speech.md on a small scale; skipped where their programs are missing."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from system.commands import succeed, transduce
from transduce.data.lines import read_lines

ROOT = Path(__file__).parents[2]
SMALL = ["--set", "model.d_model=32", "--set", "model.d_ff=64", "--set", "model.n_encoder_layers=1"]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(name: str, folder: Path) -> None:
    short = ["--set", "training.max_updates=2", "--set", "training.precision=float32"]
    run = folder / "run"
    succeed("train", ROOT / "examples" / f"{name}.toml", "--data", folder, "--run", run, *SMALL, *short)


def test_digits(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    example("digits").main(tmp_path)
    train("digits", tmp_path)
    done = transduce("evaluate", tmp_path / "run", "--labels", tmp_path / "test.safetensors")
    assert "(360 examples)" in done.out, done.err


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng")
def test_spoken_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoken = example("spoken_digits")
    spoken.main([str(tmp_path), "24"])
    train("spoken_digits", tmp_path)
    heard, test = tmp_path / "heard.txt", tmp_path / "test.txt"
    assert transduce("translate", tmp_path / "run", tmp_path / "test.safetensors", "-o", heard).code == 0
    assert len(list(read_lines(heard))) == len(list(read_lines(test))) == 3
    spoken.main(["--wer", str(test), str(test)])
    assert "word error rate 0.00%" in capsys.readouterr().out


def test_word_errors_are_counted() -> None:
    word_errors = example("spoken_digits").word_errors
    for reference, hypothesis, n in (("", "", 0), ("a b", "", 2), ("", "a", 1), ("a b c", "a c", 1), ("a b", "b a", 2)):
        assert word_errors(reference.split(), hypothesis.split()) == n
