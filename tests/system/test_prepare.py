"""`transduce prepare`: the same store from any workers, and what a kill leaves."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from system.commands import succeed, transduce
from transduce.config.recipe import to_toml
from transduce.config.settings import Settings
from transduce.data import preparation
from transduce.data.encoding import EncodePairs
from transduce.errors import TransduceError
from transduce.logging import Log
from transduce.pipeline import prepare

QUIET = Log(quiet=True)
N = 1500


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two corpora: text files with duplicates, long pairs, control characters and Windows line ends; and TSV."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(1)
    words = [("dog", "Hund"), ("cat", "Katze"), ("house", "Haus"), ("red", "rot"), ("sees", "sieht"), ("a\x01b", "a b")]
    pairs = [
        tuple(map(" ".join, zip(*draw.choices(words, k=draw.choice((1, 2, 5, 60))), strict=True))) for _ in range(N)
    ]
    for side, name in enumerate(("en", "de")):
        lines = "".join(f"{pair[side]}\r\n" for pair in pairs)
        (folder / f"a.{name}").write_text("\ufeff" + lines, encoding="utf-8", newline="")
    (folder / "b.tsv").write_text("".join(f"the {i} {src}\tdas {i} {tgt}\n" for i, (src, tgt) in enumerate(pairs)))
    (folder / "t.tsv").write_text("the 7 dogs\tdas 7\nthe 3 " + pairs[3][0] + "\tdas 3 " + pairs[3][1] + "\n")
    return folder


def settings(texts: Path) -> Settings:
    train = [{"src": f"{texts}/a.en", "tgt": f"{texts}/a.de", "weight": 2}, {"path": f"{texts}/b.tsv"}]
    return Settings.from_mapping(
        {
            "data": {"train": train, "test": [{"path": f"{texts}/t.tsv"}], "deduplicate": True, "max_length": 50},
            "tokenizer": {"kind": "char"},
            "model": {"preset": "tiny"},
            "training": {"max_updates": 1, "batch_tokens": 512, "precision": "float32"},
        }
    )


def prepared(texts: Path, run: Path, n_workers: int) -> dict[str, bytes]:
    prepare(settings(texts).with_values("data", workers=n_workers), run, log=QUIET)
    files = [run / "data.json", *run.glob("tokenizer*"), *(run / "tokens").rglob("*.*")]
    return {str(file.relative_to(run)): file.read_bytes() for file in files if file.is_file()}


@pytest.fixture(scope="module")
def whole(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The store that one process prepares, in one chunk."""
    return prepared(texts, tmp_path_factory.mktemp("whole") / "run", 1)


def in_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "CHUNK", 200)


@pytest.mark.parametrize("n", [1, 3])
def test_any_number_of_workers_prepares_the_same_bytes(
    texts: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    in_small_chunks(monkeypatch)
    assert prepared(texts, tmp_path / "run", n) == whole
    assert any(name.startswith("tokens/train/") for name in whole)


class Fatal(EncodePairs):
    """A function whose process is killed."""

    def __call__(self, record: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_process_is_an_error_and_the_same_command_resumes(
    texts: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_small_chunks(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr("transduce.tasks.translation.EncodePairs", Fatal)
        with pytest.raises(TransduceError, match=r"a worker process was killed.*data\.workers"):
            prepared(texts, tmp_path / "run", 2)
    assert prepared(texts, tmp_path / "run", 2) == whole


def running() -> dict[int, int]:
    """The parents of all processes that have not ended."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, *_ = file.read_text().rpartition(")")[2].split()
            if state != "Z":
                found[int(file.parent.name)] = int(parent)
    return found


def descendants(pid: int, parents: dict[int, int]) -> set[int]:
    own = {child for child, parent in parents.items() if parent == pid}
    return own.union(*(descendants(child, parents) for child in own))


COMMAND = """
from transduce.data import preparation
preparation.CHUNK = 20
from transduce.__main__ import main
main()
"""


def command(texts: Path, folder: Path) -> list[str]:
    """Prepare into the folder `run`, in small chunks."""
    recipe = folder / "recipe.toml"
    recipe.write_text(to_toml(settings(texts)))
    return [sys.executable, "-c", COMMAND, "prepare", str(recipe), "--run", str(folder / "run")]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_kills_at_random_moments_change_nothing_and_leave_no_process(
    texts: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    def written() -> int:
        """Bytes of intermediate results."""
        total = 0
        for file in (tmp_path / "run" / "preparation").glob("*"):
            with contextlib.suppress(FileNotFoundError):
                total += file.stat().st_size
        return total

    draw = random.Random(3)
    n_killed = n_reused = 0
    for _ in range(6):
        before = written()
        process = subprocess.Popen([*command(texts, tmp_path), "--set", "data.workers=2", "--quiet"])
        while process.poll() is None and written() <= before:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.2))
        started = descendants(process.pid, running())
        process.kill()
        if process.wait() == 0:
            break
        n_killed += 1
        n_reused += before > 0
        until = time.monotonic() + 10
        while left := started & running().keys():
            assert time.monotonic() < until, left
            time.sleep(0.05)
    assert n_killed and n_reused
    assert prepared(texts, tmp_path / "run", 1) == whole


def test_the_command_prepares_what_train_continues(texts: Path, tmp_path: Path) -> None:
    files = ("--src", texts / "a.en", "--tgt", texts / "a.de", "--run", tmp_path / "run")
    values = ("training.max_updates=1", "training.valid_bleu_sentences=0", "tokenizer.kind=char", "model.preset=tiny")
    overrides = [part for value in values for part in ("--set", value)]
    succeed("prepare", *files, *overrides, says=["transduce train"])
    assert (tmp_path / "run" / "data.json").exists() and not (tmp_path / "run" / "model.safetensors").exists()
    (texts / "a.en").rename(texts / "moved")
    try:
        assert transduce("train", *files, *overrides).code == 0
    finally:
        (texts / "moved").rename(texts / "a.en")
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_full_disk_keeps_what_is_prepared(texts: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: large enough for the text, too small for the store."""
    (tmp_path / "recipe.toml").write_text(to_toml(settings(texts)))
    run = tmp_path / "run"
    script = "import resource, sys, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
    script += f"sys.argv = ['transduce', 'prepare', '{tmp_path}/recipe.toml', '--run', '{run}']; "
    script += "runpy.run_module('transduce', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2 and "File too large" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert any((run / "preparation").iterdir())
    assert prepared(texts, run, 1) == whole
