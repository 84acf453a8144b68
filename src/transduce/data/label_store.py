"""The store of labelled texts: each packed as the model reads it, with its label's number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transduce.data.arrays import check_offsets
from transduce.data.labelled import Labelled, number_of
from transduce.data.sentence_pairs import Packed, pack
from transduce.data.stored import flat, read_arrays, write_arrays
from transduce.errors import RunFolderError
from transduce.text.special import Vocabulary

KIND = "labelled texts, 1"
_NAMES = ("ids", "offsets", "seconds", "labels")


@dataclass(frozen=True, slots=True, eq=False)
class LabelStore:
    """ids [sum of lengths], offsets [n + 1], seconds [n] (where segment 1 begins), labels [n]."""

    ids: np.ndarray
    offsets: np.ndarray
    seconds: np.ndarray
    labels: np.ndarray
    facts: dict[str, Any]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, frame counted, [n]."""
        return np.diff(self.offsets)

    def __getitem__(self, i: int) -> Packed:
        ids = np.asarray(self.ids[self.offsets[i] : self.offsets[i + 1]], dtype=np.int64)
        return Packed(ids, (np.arange(len(ids)) >= self.seconds[i]).astype(np.int64))

    @classmethod
    def open(cls, folder: Path) -> LabelStore:
        """Map the store in `folder`. `RunFolderError` where it is missing or damaged."""
        arrays, facts = read_arrays(folder, _NAMES, kind=KIND)
        n = len(arrays["labels"])
        check_offsets(Path(folder) / "offsets.npy", arrays["offsets"], end=len(arrays["ids"]), n=n)
        if len(arrays["seconds"]) != n:
            raise RunFolderError(f"{Path(folder) / 'seconds.npy'} is damaged: {len(arrays['seconds'])} for {n} texts")
        return cls(arrays["ids"], arrays["offsets"], arrays["seconds"], arrays["labels"], facts)


def encode_texts(texts: Sequence[tuple[str, ...]], vocabulary: Vocabulary, *, longest: int) -> list[Packed]:
    """Texts or pairs of texts as the model reads them, cut at the end to `longest` tokens, the longer one first."""
    sides = [vocabulary.encode_batch(list(side)) for side in zip(*texts, strict=True)]
    return [_packed(list(ids), longest) for ids in zip(*sides, strict=True)]


def build_label_store(
    folder: Path,
    examples: Sequence[Labelled],
    labels: Sequence[str],
    vocabulary: Vocabulary,
    *,
    longest: int,
    fingerprint: str = "",
) -> LabelStore:
    """Encode and write. Raises `DataError` for an unknown label, `RunFolderError` where the disk is full."""
    numbers = [number_of(example, labels) for example in examples]
    packed = encode_texts([example.texts for example in examples], vocabulary, longest=longest)
    ids, offsets = flat((one.ids for one in packed), vocabulary.vocab_size)
    arrays = {
        "ids": ids,
        "offsets": offsets,
        "seconds": np.array([len(one.ids) - int(one.segments.sum()) for one in packed], dtype=np.int32),
        "labels": np.array(numbers, dtype=np.int32),
    }
    cut = sum(len(one.ids) >= longest for one in packed)
    write_arrays(folder, arrays, {"kind": KIND, "fingerprint": fingerprint, "longest": cut})
    return LabelStore.open(folder)


def _packed(sides: Sequence[Sequence[int]], longest: int) -> Packed:
    room = longest - 1 - len(sides)
    lengths = [len(side) for side in sides]
    while sum(lengths) > room:  # by halves of what is too much, so that a long text takes no long time
        longer = max(range(len(lengths)), key=lambda i: lengths[i])
        lengths[longer] -= max(1, (sum(lengths) - room) // 2)
    return pack(*(side[:n] for side, n in zip(sides, lengths, strict=True)))


def count_labels(store: LabelStore, labels: Iterable[str]) -> dict[str, int]:
    """How many examples each label has."""
    return {label: int(np.count_nonzero(store.labels == i)) for i, label in enumerate(labels)}
