"""Sequences of ids in one memory-mapped row, with where each begins; and the files that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from transduce.data.arrays import ArrayFile, checksum, map_array
from transduce.errors import RunFolderError
from transduce.runs.atomic import read_json, write_aside, write_json


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
    """Arrays and what is to be known of them, as NAME.npy and store.json; a folder that is there is replaced."""
    with write_aside(Path(folder)) as aside:
        aside.mkdir()
        for name, array in arrays.items():
            file = ArrayFile(aside / f"{name}.npy", array.dtype.type)
            try:
                file.append(array)
                file.close()
            except BaseException:
                file.abandon()
                raise
        sums = {name: checksum(aside / f"{name}.npy") for name in arrays}
        write_json(aside / "store.json", {**facts, "checksums": sums})


def read_arrays(folder: Path, names: Iterable[str], *, kind: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """What `write_arrays` wrote; a `RunFolderError` where it is missing, damaged or of another `kind`."""
    facts = read_json(Path(folder) / "store.json")
    if not isinstance(facts, dict) or facts.get("kind") != kind or not isinstance(facts.get("checksums"), dict):
        raise RunFolderError(f"{folder} is no store of kind {kind}")
    return {name: map_array(Path(folder) / f"{name}.npy", facts["checksums"].get(name)) for name in names}, facts


def read_names(path: Path) -> list[str]:
    """A list of names in a JSON file; a `RunFolderError` where it is missing or damaged."""
    names = read_json(path)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RunFolderError(f"{path} is damaged: it is no list of names")
    return names


def flat(sequences: Iterable[Iterable[int]], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """All ids in a row, uint16 where they fit, and where each sequence begins, with the end of the last behind."""
    arrays = [np.asarray(list(ids), dtype=np.uint16 if vocab_size <= 1 << 16 else np.int32) for ids in sequences]
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    empty = np.zeros(0, dtype=np.uint16 if vocab_size <= 1 << 16 else np.int32)
    return np.concatenate([empty, *arrays]), offsets
