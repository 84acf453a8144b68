"""Processes share packed weights through files that are whole or not used."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import marians
from transduce.decoding import native_model, shared_memory
from transduce.decoding.engine import Source
from transduce.decoding.native_engine import NativeEngine
from transduce.decoding.native_library import load_library
from transduce.decoding.options import TranslationOptions
from transduce.decoding.translator import Translator

KEY = "0" * 64


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRANSDUCE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Filler:
    """Fills memory with its calls' number."""

    def __init__(self) -> None:
        self.n_calls = 0

    def __call__(self, memory: mmap.mmap) -> None:
        assert memory[:] == bytes(len(memory))
        self.n_calls += 1
        memory[:] = bytes([self.n_calls]) * len(memory)


def test_the_first_process_writes_and_all_read(cache: Path) -> None:
    fill = Filler()
    one, two = (shared_memory.shared_memory(KEY, 5000, fill) for _ in range(2))
    assert one is not None and two is not None and one[:] == two[:] == b"\1" * 5000
    assert fill.n_calls == 1 and cache.stat().st_mode & 0o777 == 0o700
    code = (
        "import sys; from transduce.decoding.shared_memory import shared_memory;"
        "print(shared_memory(sys.argv[1], 5000, None)[:] == b'\\1' * 5000)"
    )
    done = subprocess.run([sys.executable, "-c", code, KEY], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize("name", [f"{KEY}.packed", ".lock"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(cache: Path, name: str) -> None:
    cache.mkdir()
    os.mkfifo(cache / name)
    assert shared_memory.shared_memory(KEY, 5000, Filler()) is None


def test_a_damaged_file_is_replaced(cache: Path) -> None:
    fill = Filler()
    shared_memory.shared_memory(KEY, 5000, fill)
    (path,) = cache.glob("*.packed")
    content = path.read_bytes()
    for number, damaged in enumerate([b"", content[:-1], content + b"x", b"x" + content[1:], content[:-1] + b"x"], 2):
        path.unlink()
        path.write_bytes(damaged)
        memory = shared_memory.shared_memory(KEY, 5000, fill)
        assert memory is not None and memory[:] == bytes([number]) * 5000
    assert fill.n_calls == 6


def test_without_a_folder_there_is_no_shared_memory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file")
    assert shared_memory.shared_memory(KEY, 5000, Filler()) is None
    monkeypatch.setenv("TRANSDUCE_CACHE", "")
    assert shared_memory.cache_folder() is None
    monkeypatch.delenv("TRANSDUCE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert shared_memory.cache_folder() == Path("/somewhere/transduce")


def test_the_files_not_used_for_longest_are_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MOST_BYTES", 12_000)
    names = [letter * 64 for letter in "abc"]
    for number, name in enumerate(names):
        shared_memory.shared_memory(name, 5000, Filler())
        os.utime(cache / f"{name}.packed", (number, number))
        shared_memory.shared_memory(names[0], 5000, Filler())  # used again
    assert {path.stem for path in cache.glob("*.packed")} == {names[0], names[2]}


@pytest.mark.skipif(shutil.which("c++") is None or isinstance(load_library(), str), reason="no native library")
@pytest.mark.parametrize("precision", ["float32", "float32-fast", "int8"])
def test_translations_from_a_shared_file_are_the_same_bits(
    precision: native_model.NativePrecision, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = marians.make_run(tmp_path / "run")
    expected = Translator.load(run, device="cpu", precision=precision).translate(marians.LINES[:12])
    assert not cache.exists()
    monkeypatch.setattr(native_model, "SHARED_BYTES", 1)
    for _ in range(2):
        translator = Translator.load(run, device="cpu", precision=precision)
        assert isinstance(translator.engine, NativeEngine)
        assert translator.translate(marians.LINES[:12]) == expected
        monkeypatch.setattr(native_model, "plain_weights", None)  # packed already
    (path,) = cache.glob("*.packed")
    content = random.Random(1).randbytes(path.stat().st_size - 32)
    monkeypatch.setattr(
        shared_memory, "_open", lambda path, size: _random(content, size)
    )  # whatever is there: no crash
    translator = Translator.load(run, device="cpu", precision=precision)
    for beam in (1, 3):
        translator.engine.translate([Source((0,), [5, 6, 7], 9)], TranslationOptions(beam=beam))


def _random(content: bytes, size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size)
    memory[:] = content[:size]
    return memory
