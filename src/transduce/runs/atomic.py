"""Files written aside, synced and renamed: what stands under a name is always whole, the old or the new.

A kill at any moment leaves at worst a hidden leftover `.NAME.*.aside`, which `remove_leftovers` clears.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transduce.errors import RunFolderError

MOST_JSON = 1 << 28
"""Bytes of the largest JSON file that is still taken for one of ours: 256 MiB."""

_WRONG_FORM = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, ZeroDivisionError)
_SUFFIX = ".aside"
_OLD = ".old.aside"  # a folder that is being replaced


@contextlib.contextmanager
def write_aside(path: Path, *, keep: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`; what the body writes there replaces `path` in one rename.

    The body writes a file, or makes a folder; it is synced to the disk before the rename, and the rename after it.
    When the body or the disk fails, the temporary is removed and `path` is as before. A failure to write
    (a full disk, a missing right) becomes a one-line `RunFolderError`; any other error of the body passes through.
    `keep`: what a failing body has written so far is not removed but becomes `partial_of(path)`.
    A link is followed. What is no file and no folder, such as /dev/null or a pipe, is written to as it stands.
    """
    given, path = path, Path(os.path.realpath(path))  # `resolve` fails at a link to itself
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{_SUFFIX}")
    try:
        yield aside
        _sync_all(aside)
        _rename(aside, path)
        _sync(path.parent)
    except OSError as error:
        _give_up(aside, path, keep=keep)
        if error.filename is not None and not _within(error.filename, path.parent):
            raise  # the body stumbled over another file: not ours to explain
        raise RunFolderError(f"cannot write {given}: {error.strerror or error}") from error
    except BaseException:
        _give_up(aside, path, keep=keep)
        raise


def partial_of(path: Path) -> Path:
    """Where `write_aside` keeps what an error has cut short: `out.de.partial` beside out.de."""
    path = Path(os.path.realpath(path))
    return path.with_name(f"{path.name}.partial")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 `text` aside and rename; line ends stay as they are. Half surrogates become JSON's escapes."""
    _write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with a final line end. Paths become strings; nan or infinity is a ValueError."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=os.fspath)
    # A file name that is not UTF-8 holds lone surrogates; as \udcXX they are JSON escapes and read back unchanged.
    _write_bytes(path, (text + "\n").encode("utf-8", errors="backslashreplace"))


def read_json(path: Path) -> Any:
    """The value in a JSON file; a missing or damaged file is a `RunFolderError` that names it."""
    content = read_bytes(path, most=MOST_JSON)
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested without end
        raise RunFolderError(f"{path} is damaged: {error}") from None


def read_bytes(path: Path, *, most: int) -> bytes:
    """The content of a file. `RunFolderError`: missing, unreadable, no file (a pipe, a device), larger than `most`."""
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:  # a pipe is not waited for
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise RunFolderError(f"{path} is no file")
            if found.st_size > most:
                raise RunFolderError(f"{path} is damaged: no such file has {found.st_size:,} bytes")
            return file.read()
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing") from None
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror or error}") from None


@contextlib.contextmanager
def expecting(what: object) -> Iterator[None]:
    """Inside, JSON is taken apart: where it has not the form that it should have, `what` is told to be damaged."""
    try:
        yield
    except _WRONG_FORM as error:
        told = " ".join(str(error).split())[:100]
        raise RunFolderError(f"{what} is damaged: it does not hold what it should ({told})") from error


def refuse_outside_links(folder: Path) -> None:
    """Refuse a folder with links that lead out of it, or with what is no file (pipes, devices): a `RunFolderError`.

    A folder is to be whole wherever it is moved; and nobody who is given one shall write, through it, elsewhere.
    """
    root = Path(os.path.realpath(folder))
    for place, folders, files in os.walk(root):
        for path in (Path(place, name) for name in (*folders, *files)):
            if path.is_symlink():
                if not Path(os.path.realpath(path)).is_relative_to(root):
                    raise RunFolderError(f"{path} is a link that leads out of the run folder; put there what it names")
                continue
            try:
                mode = path.lstat().st_mode
            except OSError:  # gone meanwhile
                continue
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise RunFolderError(f"{path} is no file")


def remove_leftovers(folder: Path) -> int:
    """Clear what killed writers left aside in `folder`; the number cleared. Only for who holds the folder's lock.

    A folder whose replacement was cut short between its two renames gets its name back.
    """
    leftovers = sorted(Path(folder).glob(f".*{_SUFFIX}"))
    for leftover in leftovers:
        path = leftover.with_name(leftover.name[1:].removesuffix(_OLD))
        if leftover.name.endswith(_OLD) and not path.exists():
            os.rename(leftover, path)
        else:
            _remove(leftover)
    return len(leftovers)


def _write_bytes(path: Path, content: bytes) -> None:
    with write_aside(path) as aside:
        aside.write_bytes(content)


def _rename(aside: Path, path: Path) -> None:
    """Put `aside` in the place of `path`. A folder with content takes two renames: the old one steps aside."""
    if not (aside.is_dir() and path.is_dir()):
        os.replace(aside, path)
        return
    old = path.with_name(f".{path.name}{_OLD}")
    _remove(old)
    os.rename(path, old)
    try:
        os.rename(aside, path)
    except BaseException:
        os.rename(old, path)
        raise
    _remove(old)


def _sync_all(path: Path) -> None:
    """Sync a file, or a folder with everything in it."""
    assert path.exists(), f"nothing was written to {path}"
    if path.is_dir():
        for child in path.iterdir():
            _sync_all(child)
    _sync(path)


def _sync(path: Path) -> None:
    """Have the system put a file, or the names in a folder, on the disk."""
    if os.name != "posix" and path.is_dir():
        return  # only POSIX systems open folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _within(name: str | bytes | int, folder: Path) -> bool:
    """Whether the file that an error names lies in `folder`."""
    return not isinstance(name, int) and Path(os.fsdecode(name)).absolute().is_relative_to(folder.absolute())


def _give_up(aside: Path, path: Path, *, keep: bool) -> None:
    """Keep a file that holds something under its partial name, or remove what was written aside."""
    with contextlib.suppress(OSError):
        if keep and aside.stat().st_size:
            os.replace(aside, partial_of(path))
    _remove(aside)


def _remove(path: Path) -> None:
    """Remove a file or folder that may not be there; a failure to do so never hides the error that led here."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
