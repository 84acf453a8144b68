"""The token store: the ids of all training pairs in memory-mapped arrays, built once and found again by a fingerprint.

A folder with `src.npy` and `tgt.npy` (all ids in a row, uint16 where they fit), `src_offsets.npy` and `tgt_offsets.npy`
(where each sentence begins), and `store.json`. Written aside and renamed: it is there as a whole or not at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from transduce.config import DataSettings
from transduce.data.arrays import ArrayFile, check_ids, check_offsets, checksum, map_array
from transduce.data.clean import Cleaner
from transduce.data.corpus import Pair
from transduce.errors import RunFolderError
from transduce.runs.atomic import expecting, read_json, write_aside, write_json
from transduce.text.tokenizer import UNK, Tokenizers

FORMAT = 1
_CHUNK = 10_000  # pairs encoded at once
_ARRAYS = ("src", "src_offsets", "tgt", "tgt_offsets")


@dataclass(frozen=True, slots=True)
class Side:
    """The sentences of one side: sentence i is `ids[offsets[i] : offsets[i + 1]]`."""

    ids: np.ndarray  # uint16 or int32 [tokens]
    offsets: np.ndarray  # int64 [N + 1]

    def __getitem__(self, i: int) -> np.ndarray:
        return self.ids[self.offsets[i] : self.offsets[i + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """int32 [N]: tokens of each sentence, its EOS counted."""
        return (np.diff(self.offsets) + 1).astype(np.int32)


class TokenStore:
    """Pairs of token ids, without special ones. `store[i]` is `(src_ids, tgt_ids)`, views without a copy."""

    def __init__(self, src: Side, tgt: Side, facts: dict[str, Any]) -> None:
        """`facts`: the content of store.json, or of one that was never written."""
        self.src, self.tgt, self.facts = src, tgt, facts
        self.src_lengths, self.tgt_lengths = src.lengths, tgt.lengths

    def __len__(self) -> int:
        return len(self.src_lengths)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"pair {i} of {len(self)}")
        i %= len(self)
        return self.src[i], self.tgt[i]

    @property
    def fingerprint(self) -> str:
        """Of content, vocabulary and cleaning; empty for a store in memory."""
        return str(self.facts.get("fingerprint", ""))

    @property
    def cleaning(self) -> dict[str, Any]:
        """The report of cleaning, as `CleanReport.to_json` gives it."""
        return dict(self.facts.get("cleaning", {}))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Pairs kept of each corpus, in order."""
        return tuple(self.facts.get("sizes", (len(self),)))

    @property
    def n_tokens(self) -> tuple[int, int]:
        """Source and target tokens, without EOS."""
        return len(self.src.ids), len(self.tgt.ids)

    @property
    def n_unknown(self) -> tuple[int, int]:
        """Source and target tokens that are unknown."""
        return int(np.count_nonzero(self.src.ids == UNK)), int(np.count_nonzero(self.tgt.ids == UNK))

    def weights(self, by_corpus: Sequence[float]) -> np.ndarray | None:
        """float64 [N]: how often an epoch passes over each pair; None where it is once for all."""
        if all(weight == 1 for weight in by_corpus):
            return None
        return np.repeat(np.asarray(by_corpus, dtype=np.float64), self.sizes)

    @classmethod
    def from_lists(cls, src: Sequence[Sequence[int]], tgt: Sequence[Sequence[int]]) -> TokenStore:
        """A store in memory."""
        assert len(src) == len(tgt)

        def side(sentences: Sequence[Sequence[int]]) -> Side:
            offsets = np.concatenate(([0], np.cumsum([len(s) for s in sentences], dtype=np.int64)))
            return Side(np.fromiter(chain.from_iterable(sentences), dtype=np.int32), offsets.astype(np.int64))

        return cls(side(src), side(tgt), {})

    @classmethod
    def open(cls, folder: Path, fingerprint: str | None = None) -> TokenStore:
        """Map the store in `folder`. `RunFolderError` where it is missing, damaged or of another fingerprint."""
        folder = Path(folder)
        facts = read_json(folder / "store.json")
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise RunFolderError(f"{folder} is no token store of format {FORMAT}")
        if fingerprint is not None and facts.get("fingerprint") != fingerprint:
            raise RunFolderError(f"{folder} was made from other text, with another vocabulary or cleaned otherwise")
        with expecting(folder / "store.json"):
            sums, sizes = dict(facts["checksums"]), [int(n) for n in facts["sizes"]]
            facts["cleaning"] = dict(facts["cleaning"])
        arrays = [map_array(folder / f"{name}.npy", sums.get(name)) for name in _ARRAYS]
        for name, ids, offsets in zip(("src", "tgt"), arrays[::2], arrays[1::2], strict=True):
            check_offsets(folder / f"{name}_offsets.npy", offsets, end=len(ids), n=len(arrays[1]) - 1)
        if sum(sizes) != len(arrays[1]) - 1:
            raise RunFolderError(f"{folder / 'store.json'} is damaged: its sizes are not those of the text")
        return cls(Side(*arrays[:2]), Side(*arrays[2:]), facts)

    def check(self, folder: Path, *, n_src: int, n_tgt: int) -> None:
        """Refuse ids beyond the vocabularies' sizes; `folder` is what the error names."""
        check_ids(folder / "src.npy", self.src.ids, n_src)
        check_ids(folder / "tgt.npy", self.tgt.ids, n_tgt)


def fingerprint_of(digests: Sequence[bytes], settings: DataSettings, tokenizers: Tokenizers, *extra: str) -> str:
    """The fingerprint of the store that these would give: sha256 over the files' content, vocabularies and cleaning.

    `digests`: of the sources (`Source.digest`); names and places of the files do not count. `extra`: whatever else
    decides which pairs go in.
    """
    total = hashlib.sha256(f"transduce token store {FORMAT}\n".encode())
    for key in ("src_lang", "tgt_lang", "max_length", "max_ratio", "deduplicate", "drop_copies"):
        total.update(f"{key}={getattr(settings, key)!r}\n".encode())
    for model in (tokenizers.src.model, tokenizers.tgt.model):
        total.update(hashlib.sha256(model).digest())
    for digest in digests:
        total.update(digest)
    for text in extra:
        total.update(hashlib.sha256(text.encode()).digest())
    return total.hexdigest()


def build_store(
    folder: Path,
    streams: Sequence[Iterable[Pair]],
    tokenizers: Tokenizers,
    settings: DataSettings,
    *,
    fingerprint: str = "",
    name: str = "training text",
    progress: Callable[[int], object] | None = None,
) -> TokenStore:
    """Clean and encode the pairs of each corpus and write the store; one that lies in `folder` is replaced.

    Bounded memory. `progress` is called with the number of pairs read so far. Raises what reading the streams raises,
    `DataError` where no pair is left (`name` says of what), `RunFolderError` where the disk is full.
    """
    cleaner, sizes = Cleaner(settings), list[int]()
    with write_aside(Path(folder)) as aside:
        aside.mkdir()
        with _Writer(aside, "src", tokenizers.n_src) as src, _Writer(aside, "tgt", tokenizers.n_tgt) as tgt:
            for stream in streams:
                before = cleaner.report.kept
                for chunk in _chunks(cleaner.texts(stream)):
                    _encode(chunk, tokenizers, cleaner, src=src, tgt=tgt)
                    if progress is not None:
                        progress(cleaner.report.read)
                sizes.append(cleaner.report.kept - before)
        cleaner.report.require_pairs(settings, name)
        facts = {
            "format": FORMAT,
            "fingerprint": fingerprint,
            "sizes": sizes,
            "cleaning": cleaner.report.to_json(),
            "checksums": {array: checksum(aside / f"{array}.npy") for array in _ARRAYS},
        }
        write_json(aside / "store.json", facts)
    return TokenStore.open(folder)


def find_store(folder: Path, fingerprint: str) -> TokenStore | None:
    """The store in `folder` if it is whole and has this fingerprint: what a second start goes on with."""
    try:
        return TokenStore.open(folder, fingerprint)
    except RunFolderError:
        return None


def _encode(chunk: list[Pair], tokenizers: Tokenizers, cleaner: Cleaner, *, src: _Writer, tgt: _Writer) -> None:
    """Encode a chunk, drop what is too long, and write the rest."""
    src_ids = tokenizers.src.encode_batch([pair.src for pair in chunk])
    tgt_ids = tokenizers.tgt.encode_batch([pair.tgt for pair in chunk])
    fits = [cleaner.lengths_fit(p, len(s), len(t)) for p, s, t in zip(chunk, src_ids, tgt_ids, strict=True)]
    src.append([ids for ids, fit in zip(src_ids, fits, strict=True) if fit])
    tgt.append([ids for ids, fit in zip(tgt_ids, fits, strict=True) if fit])


def _chunks(pairs: Iterator[Pair]) -> Iterator[list[Pair]]:
    while chunk := list(islice(pairs, _CHUNK)):
        yield chunk


class _Writer:
    """Writes one side, chunk by chunk."""

    def __init__(self, folder: Path, side: str, vocab_size: int) -> None:
        self._ids = ArrayFile(folder / f"{side}.npy", np.uint16 if vocab_size <= 1 << 16 else np.int32)
        self._offsets = ArrayFile(folder / f"{side}_offsets.npy", np.int64)
        self._end = 0
        self._offsets.append(np.zeros(1, np.int64))

    def append(self, sentences: Sequence[Sequence[int]]) -> None:
        ends = self._end + np.cumsum([len(ids) for ids in sentences], dtype=np.int64)
        self._offsets.append(ends)
        self._ids.append(np.fromiter(chain.from_iterable(sentences), dtype=self._ids.dtype))
        self._end = self._ids.n

    def __enter__(self) -> _Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._ids, self._offsets):
            file.close() if kind is None else file.abandon()
