"""A lock on a folder: one training process at a time.

The system locks the file `.lock` and releases it when the process exits. The file contains the process number and the
host for messages. If the file system has no `flock` (Lustre without `-o flock`), the existence of the file is the lock,
as in the library filelock. Such a lock is taken over if its process no longer runs on this host. Whether a process on
another host still runs is unknown, so the user has to remove its lock.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from transduce.errors import FolderInUse, RunFolderError, cannot_write

NAME = ".lock"


class FolderLock:
    """Locks a folder from construction to `release` or the end of the process."""

    def __init__(self, folder: Path, *, use: str = "training in it") -> None:
        """Take the lock. Raises `FolderInUse` if another process, or other code of this process, holds it.

        `use`: the probable activity of the holder, for the error message.
        """
        self.path = Path(folder) / NAME
        self._lock = FileLock(self.path, thread_local=False)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            is_soft = isinstance(self._lock, SoftFileLock)
            hint = f"; if that process no longer runs, remove {self.path}" if is_soft else ""
            raise FolderInUse(
                f"{folder} is in use: {_owner(self.path)} is {use}; wait for it, or name another folder{hint}"
            ) from None
        if not isinstance(self._lock, SoftFileLock):  # a `SoftFileLock` writes this content itself
            with contextlib.suppress(OSError):  # Windows allows nobody to write to a locked file
                self.path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n", encoding="utf-8")

    def release(self) -> None:
        """Remove the file and unlock it; a second call does nothing."""
        if self._lock.is_locked and not isinstance(self._lock, SoftFileLock):
            with contextlib.suppress(OSError):  # Windows cannot remove an open file
                self.path.unlink()  # before unlocking: afterwards another process may have locked it
        self._lock.release()


def _owner(path: Path) -> str:
    """Describe the owner of a lock, whose process number and host are the lines of the lock's file."""
    with contextlib.suppress(OSError, ValueError):
        pid, host = path.read_text(encoding="utf-8").split()[:2]
        return f"process {int(pid)} on {host}"
    return "another process"


@contextlib.contextmanager
def locked_folder(folder: Path, *, use: str) -> Iterator[None]:
    """Create a folder and lock it inside the `with` block, in which a failure to write becomes a `RunFolderError`.

    `use`: see `FolderLock`. After an error, created folders that are still empty are removed.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        _make(folder)
        lock = FolderLock(folder, use=use)
        try:
            yield
        finally:
            lock.release()
    except BaseException as error:
        with contextlib.suppress(OSError):
            for path in made:  # the innermost first
                path.rmdir()
        if not isinstance(error, OSError):
            raise
        where = error.filename or folder
        raise cannot_write(where, error) from error


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next(path for path in (folder, *folder.parents) if path.exists())
        raise RunFolderError(f"cannot write {file}: it is a file; name a folder") from error
