"""One training process a folder, and the lock dies with its holder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from transduce.errors import RunFolderError
from transduce.runs.lock import FolderLock

HOLD = """
import sys
from pathlib import Path
from transduce.runs.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    """A process that holds the lock until it is killed."""
    source = Path(__file__).parents[3] / "src"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(source)},
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    process = hold(tmp_path)
    try:
        with pytest.raises(RunFolderError, match=rf"{tmp_path} is in use: process {process.pid} on .* trains in it"):
            FolderLock(tmp_path)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert (tmp_path / ".lock").exists(), "a killed process cannot clean up"
    FolderLock(tmp_path).release()
    assert not (tmp_path / ".lock").exists()


def test_one_process_cannot_train_twice_in_a_folder(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(RunFolderError, match=f"process {os.getpid()}"):
        FolderLock(tmp_path)
    lock.release()
    lock.release()
    FolderLock(tmp_path).release()


def test_a_release_leaves_the_lock_of_another_alone(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    (tmp_path / ".lock").unlink()  # somebody removed the file by hand
    second = FolderLock(tmp_path)
    first.release()
    assert (tmp_path / ".lock").exists()
    with pytest.raises(RunFolderError):
        FolderLock(tmp_path)
    second.release()
