"""What a folder of others may ask for: sizes, before anything is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transduce.errors import RunFolderError, UserError

MOST_LAYERS, MOST_POSITIONS, MOST = 1 << 10, 1 << 16, 1 << 24
"""Largest sizes that are believed; each is far beyond what was ever published, and small enough to be counted to."""

MOST_BYTES = 1 << 28
"""The largest JSON file or vocabulary that is read."""

PADDED_TO, MOST_PADDING = 8, 127
"""A model may have some more rows than its vocabulary has pieces, where that makes their number a round one."""


def no_sizes(config: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """What keeps the values of some keys from being sizes, one line each that is there."""
    told = [f"{key} is missing" for key in keys if key not in config]
    for key in keys:
        value, most = config.get(key, 1), _most(key)
        if type(value) is not int or value < (2 if "position" in key else 1):
            told.append(f"{key} = {repr(value)[:40]} is no size")
        elif value > most:
            told.append(f"{key} = {repr(value)[:40]} is too large; at most {most:,}")
    return told


def check_padding(n_pieces: int, *, n: int, origin: Path) -> None:
    """Refuse a vocabulary that is not the model's: with fewer pieces than it has rows, but for padding."""
    if n_pieces != n and (n % PADDED_TO or n - n_pieces > MOST_PADDING):
        raise UserError(
            f"{origin}: the vocabulary has {n_pieces:,} pieces, and config.json says vocab_size {n:,}: it is not this "
            "model's"
        )


def read_bytes(path: Path) -> bytes:
    """The content of a file, a link to one too; a `RunFolderError` where it is none, or larger than any should be."""
    check_is_file(path)
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise RunFolderError(f"{path} has {size:,} bytes; at most {MOST_BYTES:,} are read")
        return path.read_bytes()
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror or error}") from None


def check_is_file(path: Path) -> None:
    """Refuse what is missing, and folders, pipes and devices: a pipe would be waited for, a device never end."""
    if not path.exists():
        raise RunFolderError(f"{path} is missing")
    if not path.is_file():
        raise RunFolderError(f"{path} is no file")


def listed(names: Iterable[str], most: int = 1000) -> str:
    """Names of others for one line: none longer than 200 characters, and no more than `most`."""
    names = list(names)
    more = f", and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(name if len(name) <= 200 else f"{name[:200]}…" for name in names[:most]) + more


def _most(key: str) -> int:
    if "position" in key:
        return MOST_POSITIONS
    return MOST_LAYERS if "layer" in key else MOST
