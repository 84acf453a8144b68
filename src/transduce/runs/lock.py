"""One training process a folder: an advisory lock that the system releases when its holder dies."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import IO

from transduce.errors import RunFolderError


class FolderLock:
    """Holds `.lock` in a folder from construction to `release` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        """Take the lock; `RunFolderError` where another process (or another part of this one) holds it."""
        self.path = Path(folder) / ".lock"
        self._file: IO[str] | None = None
        while self._file is None:
            file = self.path.open("a+", encoding="utf-8")
            if not _try_lock(file):
                file.seek(0)
                holder = file.read().strip() or "another process"
                file.close()
                raise RunFolderError(
                    f"{folder} is in use: {holder} trains in it; wait for it, or name another folder with --run"
                )
            # The holder before removes the name at its end: a lock on a file that has lost its name locks nothing.
            if _same_file(file, self.path):
                self._file = file
            else:
                file.close()
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def release(self) -> None:
        """Remove the name, then let go; a second call does nothing."""
        if self._file is not None:
            if _same_file(self._file, self.path):
                self.path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


def _try_lock(file: IO[str]) -> bool:
    try:
        import fcntl
    except ImportError:  # not a POSIX system: nothing to lock with
        return True
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _same_file(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
