"""A lock on a run folder: one training process at a time.

`.lock` is locked with `flock`, which the system releases when the process exits, and contains host and process for
messages. Some file systems (NFS, Lustre) and Windows have no `flock`. There the file itself is the lock: it is taken
over if its process no longer runs on this host; of other hosts we cannot know, so the user has to remove it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from transduce.errors import FolderInUse, RunFolderError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

_POSIX = os.name == "posix"
_NO_FLOCK = "without flock"
_OWNER = re.compile(r"process (\d+) on (\S+)")
WAIT_SECONDS = 1.0  # between checks of a lock that another process has
_SETTLE_SECONDS = 0.2  # for two processes that take over the same stale file at the same time


class FolderLock:
    """Locks a folder from construction to `release` or the end of the process.

    `note` is for the user: what the file system lacks, or empty.
    """

    def __init__(self, folder: Path, *, use: str = "training in it", option: str = "--run") -> None:
        """Take the lock. Raises `FolderInUse` if another process, or another part of this one, has it.

        For that message: `use`, what the other process is doing, and `option`, which names another folder.
        """
        self.path, self.note = Path(folder) / ".lock", ""
        self._use, self._option = use, option
        self._file: IO[str] | None = None
        while self._file is None:
            file = open_lock(self.path)
            locked = _try_flock(file)
            file.seek(0)
            owner = file.read().strip()
            if locked is False or _is_held_without_flock(owner, locked=bool(locked)):
                file.close()
                raise self._in_use(owner, certain=locked is False)
            if locked is None:
                file.close()
                self._file = self._create()
            # The previous owner removes the name when it is done: a lock on a file without a name locks nothing.
            elif _is_same_file(file, self.path):
                self._file = file
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                file.flush()
            else:
                file.close()

    def release(self) -> None:
        """Remove the file and unlock it; a second call does nothing."""
        file, self._file = self._file, None
        if file is None:
            return
        remove = _is_same_file(file, self.path)
        if not _POSIX:
            file.close()  # an open file cannot be removed
        if remove:
            self.path.unlink(missing_ok=True)  # before unlocking, or another process could have locked it meanwhile
        file.close()

    def _create(self) -> IO[str]:
        """Lock by putting a file of ours in the place of a free one."""
        self.note = (
            f"the file system of {self.path.parent} does not support flock; the file {self.path.name} is the lock "
            "instead: if this process is killed, another host cannot know, and you have to remove the file"
        )
        ours = f"process {os.getpid()} on {socket.gethostname()} {_NO_FLOCK} {secrets.token_hex(4)}"
        aside = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}.aside")
        aside.write_text(f"{ours}\n", encoding="utf-8")
        os.replace(aside, self.path)
        time.sleep(_SETTLE_SECONDS)
        file = self.path.open("r+", encoding="utf-8")
        if (owner := file.read().strip()) != ours:
            file.close()
            raise self._in_use(owner, certain=True)
        return file

    def _in_use(self, owner: str, *, certain: bool) -> FolderInUse:
        found = _OWNER.match(owner)
        who = found[0] if found else "another process"
        hint = "" if certain else f"; if that process no longer runs, remove {self.path}: without flock we cannot know"
        return FolderInUse(
            f"{self.path.parent} is in use: {who} is {self._use}; wait for it, or name another folder with "
            f"{self._option}{hint}"
        )


@contextlib.contextmanager
def locked_folder(
    folder: Path, *, use: str, option: str, warn: Callable[[str], object], wait: bool = False
) -> Iterator[None]:
    """Make a folder and lock it; inside, a failure to write is a `RunFolderError`.

    `use` and `option`: as for `FolderLock`, whose note goes to `warn`. `wait`: for another process that has the lock,
    after a warning, where otherwise a `FolderInUse` is raised. After an error, folders that this made and that are
    still empty are removed.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        _make(folder, option)
        lock = _take(folder, use=use, option=option, say=warn if wait else None)
        if lock.note:
            warn(lock.note)
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
        raise RunFolderError(f"cannot write {where}: {error.strerror or error}; the same command resumes") from error


def _make(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next(path for path in (folder, *folder.parents) if path.exists())
        raise RunFolderError(f"cannot write {file}: it is a file; name a folder with {option}") from error


def _take(folder: Path, *, use: str, option: str, say: Callable[[str], object] | None) -> FolderLock:
    """The lock. With `say`, wait for it, and say so once."""
    said = False
    while True:
        try:
            return FolderLock(folder, use=use, option=option)
        except FolderInUse as error:
            if say is None:
                raise
            if not said:
                say(f"waiting: {error}")
                said = True
            time.sleep(WAIT_SECONDS)


def is_locked(folder: Path) -> bool:
    """Whether another process trains in a run folder, as far as this host can know."""
    try:
        with open_lock(Path(folder) / ".lock", make=False) as file:
            locked = _try_flock(file, shared=True)
            return locked is False or _is_held_without_flock(file.read(), locked=bool(locked))
    except (OSError, RunFolderError):
        return False


def open_lock(path: Path, *, make: bool = True) -> IO[str]:
    """The file of a lock, to append to and to read; `make`: it may be missing, else it is only read.

    Raises `RunFolderError` for a folder, a pipe or a device; the last two could be waited for without end.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND if make else os.O_RDONLY
    with contextlib.suppress(IsADirectoryError):
        descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return open(descriptor, "a+" if make else "r", encoding="utf-8")
        os.close(descriptor)
    raise RunFolderError(f"{path} is not a file; remove it")


def _try_flock(file: IO[str], *, shared: bool = False) -> bool | None:
    """Whether the file is locked now; False: another process has the lock; None: flock does not work here."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file.fileno(), (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # ENOLCK, EOPNOTSUPP, ENOSYS, EINVAL: whatever the reason, nothing is locked
        return None
    return True


def _is_held_without_flock(owner: str, *, locked: bool) -> bool:
    """Whether a lock file with this content must be respected; `locked`: we have an flock on it.

    With an flock, only owners count that could not take one: others are gone, or they would have it.
    """
    found = _OWNER.match(owner)
    if found is None or (locked and _NO_FLOCK not in owner):
        return False
    pid, host = int(found[1]), found[2]
    return host != socket.gethostname() or _is_running(pid)


def _is_running(pid: int) -> bool:
    if not _POSIX:
        return True  # os.kill would end the process there
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's
        pass
    return True


def _is_same_file(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
