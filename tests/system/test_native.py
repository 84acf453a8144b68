"""The native library from the command line: `make native` builds it, `transduce translate` uses it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import marians
from transduce.decoding.native_engine import NativeEngine
from transduce.decoding.translator import Translator

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return marians.make_run(tmp_path_factory.mktemp("native") / "run")


def translate(run: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "transduce", "translate", str(run), *options],
        input="\n".join(marians.LINES[:8]),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


def test_the_library_is_built_and_used_at_every_precision(run: Path) -> None:
    for precision in ("float32", "float32-fast", "int8"):
        translator = Translator.load(run, device="cpu", precision=precision)  # type: ignore[arg-type]
        assert isinstance(translator.engine, NativeEngine) and translator.slow_because == ""
        done = translate(run, "--device", "cpu", "--precision", precision, "--beam", "2")
        assert done.returncode == 0 and "PyTorch" not in done.stderr
        assert len(done.stdout.splitlines()) == 8


def test_without_the_library_pytorch_decodes_the_same_and_says_so(run: Path) -> None:
    native, slow = translate(run, "--device", "cpu"), translate(run, "--device", "cpu", TRANSDUCE_NATIVE_LIBRARY="/no")
    assert native.stdout == slow.stdout and slow.returncode == 0
    (line,) = (line for line in slow.stderr.splitlines() if "PyTorch" in line)
    assert "not built" in line and "make native" in line


def test_an_unknown_precision_is_refused(run: Path) -> None:
    done = translate(run, "--precision", "int4")
    assert done.returncode == 2
    assert "precision = 'int4': allowed are float32, float32-fast, int8, bfloat16" in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_native_without_a_compiler_succeeds_and_says_so() -> None:
    command = ["make", "native", "CXX=no-such-compiler"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "no C++ compiler" in done.stdout
