"""Atomic writes, completely or not at all, with a one-line error if the disk fails; locks of folders."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from transduce.errors import FolderInUse, RunFolderError
from transduce.runs.atomic import (
    partial_of,
    read_json,
    remove_leftovers,
    write_aside,
    write_json,
    write_text,
)
from transduce.runs.lock import FolderLock, locked_folder


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_file_is_replaced_only_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with write_aside(path) as aside:
        assert aside.parent == tmp_path
        aside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("error", [ValueError("bug"), KeyboardInterrupt()])
def test_a_failing_body_leaves_the_old_file_and_no_temporary(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(type(error)), write_aside(path) as aside:
        aside.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("error", [ValueError("bug"), KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
@pytest.mark.parametrize("written", ["half", ""])
def test_keep_leaves_an_unfinished_file(tmp_path: Path, error: BaseException, written: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises((type(error), RunFolderError)), write_aside(path, keep=True) as aside:
        aside.write_text(written)
        raise error
    assert path.read_text() == "old"
    assert names(tmp_path) == (["a.txt", "a.txt.partial"] if written else ["a.txt"])
    assert not written or partial_of(path).read_text() == "half"


def test_a_full_disk_is_a_one_line_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with pytest.raises(RunFolderError) as caught, write_aside(path) as aside:
        aside.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    advice = "free some space and run the same command again"
    assert str(caught.value) == f"cannot write {path}: No space left on device; {advice}"
    assert names(tmp_path) == []


def test_a_missing_folder_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"cannot write .*: No such file or directory"):
        write_text(tmp_path / "none" / "a.txt", "x")


def test_an_error_about_another_file_passes_through(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), write_aside(tmp_path / "out" / "a.txt"):
        (tmp_path / "input.txt").read_text()


def test_a_folder_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "u1"
    for content in ("one", "two"):
        with write_aside(path) as aside:
            (aside / "sub").mkdir(parents=True)
            (aside / "sub" / f"{content}.txt").write_text(content)
        assert [p.name for p in path.rglob("*.txt")] == [f"{content}.txt"]
    assert names(tmp_path) == ["u1"]


def test_leftovers_are_removed_and_a_half_replaced_folder_is_restored(tmp_path: Path) -> None:
    (tmp_path / ".a.json.12.ab.aside").write_text("half")
    (tmp_path / ".u1.12.ab.aside").mkdir()
    (tmp_path / ".u1.old.aside").mkdir()
    (tmp_path / ".u1.old.aside" / "x").write_text("whole")
    (tmp_path / ".lock").write_text("")
    (tmp_path / "a.json").write_text("{}")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".lock", "a.json", "u1"]
    assert (tmp_path / "u1" / "x").read_text() == "whole"


def test_json_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    value = {"ä": [1, 2.5, None, "\u2028 \x00"], "path": tmp_path, "odd": "not utf-8: \udcff"}
    write_json(path, value)
    assert read_json(path) == value | {"path": str(tmp_path)}
    assert json.loads(path.read_bytes()) == read_json(path)
    assert "ä" in path.read_bytes().decode("utf-8")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"loss": float("nan")})
    assert read_json(path)["ä"][0] == 1


def test_text_keeps_its_line_ends(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "a\r\nb\u2028c\n")
    assert (tmp_path / "a.txt").read_bytes() == "a\r\nb\u2028c\n".encode()


@pytest.mark.parametrize(
    "content",
    [b"", b'{"a": 1', b"\xff{}", b"[1] 2", b"[" * 200_000, b'{"a":' * 100_000, b"1" * 5000],
    ids=["empty", "cut", "bytes", "more", "deep", "deeper", "digits"],
)
def test_damaged_json_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(content)
    with pytest.raises(RunFolderError, match=r"state\.json is damaged") as caught:
        read_json(path)
    assert "\n" not in str(caught.value)


def test_missing_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"state\.json is missing"):
        read_json(tmp_path / "state.json")


LOCKS = """
import sys
from pathlib import Path
from transduce.runs.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def start_locking(folder: Path) -> subprocess.Popen[str]:
    """A process that has the lock until it is killed."""
    source = Path(__file__).parents[3] / "src"
    process = subprocess.Popen(
        [sys.executable, "-c", LOCKS, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(source)},
    )
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    return process


def test_a_second_process_is_refused_until_the_first_exits(tmp_path: Path) -> None:
    process = start_locking(tmp_path)
    try:
        with pytest.raises(
            RunFolderError, match=rf"{tmp_path} is in use: process {process.pid} on .* is training in it"
        ):
            FolderLock(tmp_path)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert (tmp_path / ".lock").exists(), "a killed process cannot clean up"
    FolderLock(tmp_path).release()
    assert not (tmp_path / ".lock").exists()


def test_one_process_cannot_lock_twice(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(RunFolderError, match=f"process {os.getpid()}"):
        FolderLock(tmp_path)
    lock.release()
    lock.release()
    FolderLock(tmp_path).release()


@pytest.fixture
def without_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", fails)


@pytest.mark.usefixtures("without_flock")
@pytest.mark.filterwarnings("ignore:flock not supported")
def test_without_flock_the_file_is_the_lock_and_the_error_says_so(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(FolderInUse, match=rf"process {os.getpid()} on .*remove {tmp_path}/\.lock"):
        FolderLock(tmp_path)
    lock.release()
    assert not list(tmp_path.iterdir())
    FolderLock(tmp_path).release()


def test_a_lock_is_not_taken_through_a_link(tmp_path: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    (folder / ".lock").symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        FolderLock(folder)
    assert not other.exists()


def test_folders_that_stayed_empty_are_removed_after_an_error(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    for name, content in (("a", ""), ("b", "x")):
        folder = there / name / ".transduce"
        with pytest.raises(RunFolderError, match="no such cluster"), locked_folder(folder, use="testing"):
            if content:
                (folder / "a.journal").write_text(content)
            raise RunFolderError("no such cluster")
        assert folder.exists() == (there / name).exists() == bool(content)
    assert there.exists()


def test_a_lock_is_released_after_an_error_inside(tmp_path: Path) -> None:
    with pytest.raises(FolderInUse, match="another folder"), locked_folder(tmp_path, use="testing"):
        with pytest.raises(FolderInUse, match="is in use"):
            FolderLock(tmp_path)
        raise FolderInUse("another folder")
    FolderLock(tmp_path).release()
