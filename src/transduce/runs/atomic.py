"""Atomic writes: files are written under a temporary name, synced and renamed, so readers see the old or the new file.

A kill leaves at worst a hidden temporary file `.NAME.*.aside`, which `remove_leftovers` removes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transduce.errors import RunFolderError, cannot_write, message_of

MOST_JSON = 1 << 28
"""Maximum size of a JSON file in bytes: 256 MiB, for test sets and samples."""

_WRONG_FORM = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, ZeroDivisionError)
_SUFFIX = ".aside"
_OLD = ".old.aside"  # a folder that is being replaced


@contextlib.contextmanager
def write_aside(path: Path, *, keep: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to `path`; the file or folder that the body writes there replaces `path`.

    The file or folder is synced to the disk before it is renamed, and the rename is synced too. If the body or the disk
    fails, the temporary file or folder is removed and `path` is unchanged; with `keep`, an unfinished file is kept as
    `partial_of(path)`. A failure to write (full disk, missing permission) becomes a one-line `RunFolderError`; other
    errors of the body pass through. Links are followed. Devices and pipes such as /dev/null are written to directly.
    """
    given, path = path, Path(os.path.realpath(path))  # `resolve` fails at a link to itself
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{_SUFFIX}")
    try:
        yield aside
        for written in (aside, *aside.rglob("*")):
            sync(written)
        _rename(aside, path)
        sync(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            if keep and aside.stat().st_size:
                os.replace(aside, partial_of(path))
        _remove(aside)
        if isinstance(error, OSError) and _is_about(error, path.parent):
            raise cannot_write(given, error) from error
        raise


def partial_of(path: Path) -> Path:
    """Return the path where `write_aside` keeps an unfinished file: `out.de.partial` for out.de."""
    path = Path(os.path.realpath(path))
    return path.with_name(f"{path.name}.partial")


def write_text(path: Path, text: str) -> None:
    """Write `text` atomically, as UTF-8 with unchanged line ends. Lone surrogates become JSON's escapes."""
    with write_aside(path) as aside:
        aside.write_bytes(text.encode("utf-8", errors="backslashreplace"))


def write_json(path: Path, value: Any) -> None:
    """Write `value` atomically, as indented JSON. Paths become strings; nan and infinity raise `ValueError`."""
    # A file name that is not UTF-8 contains lone surrogates; as \udcXX they are JSON escapes and are read unchanged.
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=os.fspath) + "\n")


def read_json(path: Path, *, most: int = MOST_JSON) -> Any:
    """Return the value in a JSON file of at most `most` bytes. Raises `RunFolderError` for a damaged or larger file."""
    try:
        return json.loads(read_bytes(path, most=most).decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise RunFolderError(f"{path} is damaged: {error}") from None


def read_bytes(path: Path, *, most: int) -> bytes:
    """Return the content of a file. Raises `RunFolderError` if it is no readable file or larger than `most` bytes."""
    with reading(path):
        if (size := path.stat().st_size) > most:
            raise RunFolderError(f"{path} is damaged: no such file has {size:,} bytes")
        return path.read_bytes()


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context manager in which a missing or unreadable file `path` becomes a one-line `RunFolderError`."""
    try:
        if path.exists() and not path.is_file():  # reading would wait for a pipe, and not end at a device
            raise RunFolderError(f"{path} is no regular file; replace it by one")
        yield
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing") from None
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror or error}") from None


@contextlib.contextmanager
def expecting(what: object, *errors: type[Exception]) -> Iterator[None]:
    """Context manager in which errors from content of an unexpected form become `RunFolderError`.

    `what`: the file that is then reported as damaged. `errors`: further exceptions to translate.
    """
    try:
        yield
    except _WRONG_FORM + errors as error:
        detail = message_of(error)[:100]
        raise RunFolderError(f"{what} is damaged: its content has an unexpected form ({detail})") from error


@contextlib.contextmanager
def advising(advice: str, *names: str) -> Iterator[None]:
    """Context manager that appends `advice` to the message of a `RunFolderError`. `names`: see `UserError`."""
    try:
        yield
    except RunFolderError as error:
        raise RunFolderError(f"{error}; {advice}", *names) from error


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of killed processes from `folder`, which must be locked.

    A folder whose replacement was killed between its two renames gets its name back. `folder` may be missing.
    """
    for leftover in sorted(Path(folder).glob(f".*{_SUFFIX}")):
        path = leftover.with_name(leftover.name[1:].removesuffix(_OLD))
        if leftover.name.endswith(_OLD) and not path.exists():
            os.rename(leftover, path)
        else:
            _remove(leftover)


def sync(path: Path) -> None:
    """Make the system write a file, or the names in a folder, to the disk."""
    if os.name != "posix" and path.is_dir():
        return  # only POSIX systems can open folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename(aside: Path, path: Path) -> None:
    """Replace `path` by `aside`. Replacing a folder takes two renames; first the old folder gets a temporary name."""
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


def _is_about(error: OSError, folder: Path) -> bool:
    """Whether an error of the system concerns a file in `folder`, or names no file."""
    name = error.filename
    return name is None or (
        not isinstance(name, int) and Path(os.fsdecode(name)).absolute().is_relative_to(folder.absolute())
    )


def _remove(path: Path) -> None:
    """Remove a file or folder if it exists. Failures are ignored, so that they do not hide an earlier error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
