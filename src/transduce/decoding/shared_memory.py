"""Read-only memory that processes share: files of a cache folder, mapped into memory.

Packed weights of large models are here: the first process that loads a model packs its weights into a file, and all
processes map the same file, so that the system keeps one copy. A file is named by a digest of everything that its
content depends on, contains its own checksum, and is written atomically. Together the files take at most 4 GiB: the
ones not used for longest are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from transduce.errors import RunFolderError
from transduce.runs.atomic import remove_leftovers, write_aside
from transduce.runs.lock import open_lock

MOST_BYTES = 1 << 32
"""Of all files in the folder together."""

_SUFFIX = ".packed"
_N_DIGEST = hashlib.sha256().digest_size


def cache_folder() -> Path | None:
    """TRANSDUCE_CACHE, or `transduce` in the user's cache folder; None if that is unset or unknown."""
    asked = os.environ.get("TRANSDUCE_CACHE")
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(folder, "transduce") if asked is None else Path(asked)
    return path if path.is_absolute() else None


def shared_memory(key: str, size: int, fill: Callable[[mmap.mmap], None]) -> mmap.mmap | None:
    """`size` bytes that `fill` has written, in this or another process; None if there is no folder to write to.

    Args:
        key: A digest of what the content depends on.
        size: In bytes.
        fill: Writes the content into zeros. Only called where no other process has done it; its errors pass through.
    """
    folder = cache_folder()
    if folder is None:
        return None
    path = folder / f"{key}{_SUFFIX}"
    with contextlib.suppress(OSError, RunFolderError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (memory := _open(path, size)) is not None:
            return memory
        with _locked(folder):
            if (memory := _open(path, size)) is None:  # else another process has written it
                remove_leftovers(folder)
                _write(path, size, fill)
                _evict(folder, keep=path)
                memory = _open(path, size)
            return memory
    return None


def _open(path: Path, size: int) -> mmap.mmap | None:
    """The content of a file; None if it is missing or damaged."""
    if not path.is_file():  # opening a pipe would wait for a writer
        return None
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == size + _N_DIGEST:
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            file.seek(size)
            if hashlib.sha256(memory).digest() == file.read():
                with contextlib.suppress(OSError):
                    os.utime(path)  # used now
                return memory
    return None


def _write(path: Path, size: int, fill: Callable[[mmap.mmap], None]) -> None:
    with write_aside(path) as aside, aside.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, size + _N_DIGEST)  # on a full disk an error; later it would be a signal
        with mmap.mmap(file.fileno(), size) as memory:
            fill(memory)
            digest = hashlib.sha256(memory).digest()
        file.seek(size)
        file.write(digest)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Inside, other processes wait here. The system releases the lock when the process ends."""
    import fcntl  # not on Windows, which has no native library either

    with open_lock(folder / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _evict(folder: Path, *, keep: Path) -> None:
    """Remove the files not used for longest until the others are small enough together. Mapped ones stay readable."""
    found = [(path.stat().st_mtime, path.stat().st_size, path) for path in folder.glob(f"*{_SUFFIX}")]
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total > MOST_BYTES and path != keep:
            path.unlink(missing_ok=True)
            total -= size
