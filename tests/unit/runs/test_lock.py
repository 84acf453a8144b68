"""One training process per folder; a lock is released when its process exits."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from transduce.errors import FolderInUse, RunFolderError
from transduce.runs import lock as lock_module
from transduce.runs.lock import FolderLock, is_locked, locked_folder

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
    assert not is_locked(tmp_path)
    lock = FolderLock(tmp_path)
    assert lock.note == ""
    lock.release()
    assert not (tmp_path / ".lock").exists() and not is_locked(tmp_path)


def test_one_process_cannot_lock_twice(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(RunFolderError, match=f"process {os.getpid()}"):
        FolderLock(tmp_path)
    lock.release()
    lock.release()
    FolderLock(tmp_path).release()


def test_a_release_does_not_affect_another_lock(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    (tmp_path / ".lock").unlink()  # a user removed the file
    second = FolderLock(tmp_path)
    first.release()
    assert (tmp_path / ".lock").exists()
    with pytest.raises(RunFolderError):
        FolderLock(tmp_path)
    second.release()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_a_folder_in_the_place_of_the_lock_is_named_and_not_waited_for(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / ".lock")
    with pytest.raises(RunFolderError, match=rf"{tmp_path}/\.lock is not a file; remove it"):
        FolderLock(tmp_path)
    assert not is_locked(tmp_path)


# --- file systems without flock


@pytest.fixture(params=[errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, None], ids=str)
def without_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS without lockd, Lustre without -o flock, others; Windows has no fcntl at all."""
    if request.param is None:
        monkeypatch.setattr(lock_module, "fcntl", None)
        return

    def fails(descriptor: int, operation: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr("fcntl.flock", fails)


HERE = socket.gethostname()


@pytest.mark.usefixtures("without_flock")
def test_without_flock_the_file_is_the_lock_and_that_is_reported(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    assert "flock" in lock.note and str(tmp_path) in lock.note
    assert f"process {os.getpid()} on {HERE}" in (tmp_path / ".lock").read_text()
    assert is_locked(tmp_path)
    with pytest.raises(RunFolderError, match=rf"process {os.getpid()} on {HERE} .*remove {tmp_path}/\.lock"):
        FolderLock(tmp_path)
    lock.release()
    assert not list(tmp_path.iterdir()) and not is_locked(tmp_path)
    FolderLock(tmp_path).release()


@pytest.mark.usefixtures("without_flock")
def test_without_flock_a_dead_process_of_this_host_is_detected(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    (tmp_path / ".lock").write_text(f"process {process.pid} on {HERE} without flock 1234\n")
    assert not is_locked(tmp_path)
    FolderLock(tmp_path).release()


@pytest.mark.usefixtures("without_flock")
def test_without_flock_another_host_is_respected(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("process 1 on node17 without flock 1234\n")
    assert is_locked(tmp_path)
    with pytest.raises(RunFolderError, match=r"process 1 on node17 .*if that process no longer runs, remove"):
        FolderLock(tmp_path)
    assert "node17" in (tmp_path / ".lock").read_text()


@pytest.mark.usefixtures("without_flock")
def test_without_flock_only_one_of_two_takes_over_a_stale_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one replaces the file while the first waits for that to happen."""
    other = f"process {os.getpid()} on node17 without flock 5678\n"
    monkeypatch.setattr(lock_module.time, "sleep", lambda seconds: (tmp_path / ".lock").write_text(other))
    with pytest.raises(RunFolderError, match="on node17"):
        FolderLock(tmp_path)


def test_with_flock_an_owner_without_it_on_another_host_is_respected(tmp_path: Path) -> None:
    """The same folder may be mounted with and without flock."""
    (tmp_path / ".lock").write_text("process 1 on node17 without flock 1234\n")
    with pytest.raises(RunFolderError, match="on node17"):
        FolderLock(tmp_path)
    (tmp_path / ".lock").write_text("process 1 on node17\n")  # had an flock, and has lost it: it is gone
    FolderLock(tmp_path).release()


def test_on_windows_the_file_is_closed_before_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FolderLock(tmp_path)
    file, unlink = lock._file, Path.unlink
    assert file is not None

    def checked(path: Path, missing_ok: bool = False) -> None:
        assert file.closed, "Windows cannot remove an open file"
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", checked)
    monkeypatch.setattr(lock_module, "_POSIX", False)
    lock.release()
    assert not (tmp_path / ".lock").exists()


def test_folders_that_stayed_empty_are_removed_after_an_error(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    for name, content in (("a", ""), ("b", "x")):
        folder = there / name / ".transduce"
        with (
            pytest.raises(RunFolderError, match="no such cluster"),
            locked_folder(folder, use="testing", option="--output-dir", warn=print),
        ):
            if content:
                (folder / "a.journal").write_text(content)
            raise RunFolderError("no such cluster")
        assert folder.exists() == (there / name).exists() == bool(content)
    assert there.exists()


def test_waits_for_another_process_but_not_for_an_error_inside(tmp_path: Path) -> None:
    process, said = start_locking(tmp_path), list[str]()
    threading.Timer(1.5, process.kill).start()
    with (
        pytest.raises(FolderInUse, match="another folder"),
        locked_folder(tmp_path, use="testing", option="--run", warn=said.append, wait=True),
    ):
        assert process.wait() == -signal.SIGKILL
        assert is_locked(tmp_path)
        raise FolderInUse("another folder")
    assert not is_locked(tmp_path)
    assert len(said) == 1 and said[0].startswith(f"waiting: {tmp_path} is in use"), said
