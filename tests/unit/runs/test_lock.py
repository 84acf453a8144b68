"""One training process per folder; a lock is released when its process exits."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from transduce.errors import FolderInUse, RunFolderError
from transduce.runs.lock import FolderLock, locked_folder

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
