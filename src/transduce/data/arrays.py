"""Arrays of integers in files: written piece by piece, memory-mapped, verified when they are opened."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from transduce.errors import RunFolderError
from transduce.runs.atomic import read_json, write_aside, write_json

FORMAT = 1
_KINDS = (np.uint16, np.int32, np.int64)


class StoreWriter:
    """Writes the arrays of a store piece by piece. `facts` is what store.json will contain."""

    def __init__(self, folder: Path, arrays: Mapping[str, type[np.generic]]) -> None:
        self.facts: dict[str, Any] = {}
        self._dtypes = {name: np.dtype(dtype) for name, dtype in arrays.items()}
        self._counts = dict.fromkeys(arrays, 0)
        self._files = {name: (folder / f"{name}.npy").open("wb") for name in arrays}
        for name in arrays:
            self._write_header(name)

    def append(self, name: str, values: Iterable[int] | np.ndarray) -> None:
        """Append numbers to an array."""
        array = values if isinstance(values, np.ndarray) else np.fromiter(values, dtype=self._dtypes[name])
        self._files[name].write(np.ascontiguousarray(array, dtype=self._dtypes[name]).data)
        self._counts[name] += len(array)

    def append_sequences(self, name: str, offsets: str, sequences: Sequence[Sequence[int] | np.ndarray]) -> None:
        """Append sequences of ids to the array `name`, and where each ends to the array `offsets`."""
        if not self._counts[offsets]:
            self.append(offsets, np.zeros(1, np.int64))
        ends = self._counts[name] + np.cumsum([len(ids) for ids in sequences], dtype=np.int64)
        self.append(offsets, ends)
        self.append(name, chain.from_iterable(sequences))

    def close(self) -> None:
        """Write the final lengths."""
        for name, file in self._files.items():
            end = file.seek(0, 1)
            file.seek(0)
            self._write_header(name)
            assert end == file.tell() + self._counts[name] * self._dtypes[name].itemsize, "the header has grown"
            file.close()

    def abandon(self) -> None:
        """Close the files after an error."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    def _write_header(self, name: str) -> None:
        # NumPy pads the header, so that a larger length still fits.
        dtype, shape = np.lib.format.dtype_to_descr(self._dtypes[name]), (self._counts[name],)
        header = {"descr": dtype, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._files[name], header)


@contextlib.contextmanager
def write_store(folder: Path, **arrays: type[np.generic]) -> Iterator[StoreWriter]:
    """Write a store into `folder`, replacing one that is there; nothing changes where the body or the disk fails."""
    with write_aside(Path(folder)) as aside:
        aside.mkdir()
        writer = StoreWriter(aside, arrays)
        try:
            yield writer
            writer.close()
        except BaseException:
            writer.abandon()
            raise
        sums = {name: checksum(aside / f"{name}.npy") for name in arrays}
        write_json(aside / "store.json", {"format": FORMAT, **writer.facts, "checksums": sums})


def id_type(vocab_size: int) -> type[np.generic]:
    """The smallest type of numbers for the ids of a vocabulary."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def read_store(folder: Path, *names: str) -> tuple[list[np.ndarray], dict[str, Any]]:
    """The arrays and the facts of a store; a `RunFolderError` where it is missing, damaged or of another kind."""
    facts = read_json(Path(folder) / "store.json")
    if not isinstance(facts, dict) or facts.get("format", FORMAT) != FORMAT:
        raise RunFolderError(f"{folder} is not a store of format {FORMAT}")
    sums = facts.get("checksums", {"ids": facts.get("checksum")})  # the latter: text stores of version 0.1
    if not isinstance(sums, dict) or sums.keys() != set(names):
        raise RunFolderError(f"{Path(folder) / 'store.json'} is damaged: not a store of {', '.join(names)}")
    return [map_array(Path(folder) / f"{name}.npy", sums[name]) for name in names], facts


def map_array(path: Path, expected: object) -> np.ndarray:
    """Map a one-dimensional array of integers whose checksum is `expected`. Checking it also warms the disk cache."""
    try:
        if checksum(path) != expected:
            raise RunFolderError(f"{path} is damaged: its checksum differs")
        array = np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing") from None
    except RunFolderError:
        raise
    except Exception as error:  # NumPy's reader of headers fails in many ways
        reason = " ".join(str(error).split())[:100]
        raise RunFolderError(f"{path} is damaged: {reason}") from None
    if array.ndim != 1 or array.dtype not in _KINDS:
        raise RunFolderError(f"{path} is damaged: {array.dtype} of shape {list(array.shape)} is not a list of integers")
    return array


def checksum(path: Path) -> int:
    """The CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def read_names(path: Path) -> list[str]:
    """A list of names in a JSON file; a `RunFolderError` where it is missing or damaged."""
    names = read_json(path)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RunFolderError(f"{path} is damaged: it is not a list of names")
    return names


def check_offsets(path: Path, offsets: np.ndarray, *, end: int, n: int | None = None) -> None:
    """Refuse offsets [N + 1] that do not increase from 0 to `end`, or are empty; `n`: the required N."""
    whole = len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == end and bool((np.diff(offsets) >= 0).all())
    if not whole or (n is not None and len(offsets) != n + 1):
        raise RunFolderError(f"{path} is damaged: its offsets do not fit the text")


def check_lengths(path: Path, offsets: np.ndarray, most: int) -> None:
    """Refuse sequences of more than `most` tokens."""
    if len(offsets) > 1 and int(np.diff(offsets).max()) > most:
        raise RunFolderError(f"{path} is damaged: a sequence is longer than {most} tokens")


def check_ids(path: Path, ids: np.ndarray, vocab_size: int) -> None:
    """Refuse ids beyond the vocabulary."""
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise RunFolderError(f"{path} is damaged: it has ids beyond the vocabulary of {vocab_size:,} pieces")
