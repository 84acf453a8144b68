"""Turn examples into tensors. Padding, shifting and special ids are applied here, and only here.

A `TrainingBatch` is a batch of any task. `inputs` are the arguments of the model's `forward`, in order. `targets` has
`PAD` at positions without a target, and `n_targets` is their number, by which the loss is divided. `to` moves the batch
to a device. `part` selects rows and trims their padding, for updates that do not fit into memory at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from transduce.data.store import Example, Ids, Packed, RowExample
from transduce.nn.masks import SourceInput, is_real
from transduce.text.special import BOS, EOS, MASK, PAD

BatchT = TypeVar("BatchT")

RATE = 0.15
SHOWN_AS_MASK, SHOWN_AS_RANDOM = 0.8, 0.1  # the rest is unchanged


def causal(row: np.ndarray) -> RowExample:
    """Make an example that predicts every token from the tokens before it (Radford et al. 2018).

    The BOS of a document is not a target, since it would be predicted from the end of another document.
    """
    targets = np.asarray(row[1:], dtype=np.int64)
    return RowExample(row[:-1], np.where(targets == BOS, PAD, targets))


def mask(
    ids: Ids,
    draw: np.random.Generator,
    *,
    vocab_size: int,
    rate: float = RATE,
    starts: np.ndarray | None = None,
) -> RowExample:
    """Select tokens to predict; 80 % of them become MASK, 10 % a random token (Devlin et al. 2019, appendix A.1).

    Special tokens (ids up to MASK) are neither selected nor drawn. The number of selected tokens is `rate` times the
    number of ordinary tokens, rounded at random, and at least one. `starts`: for each id, whether its piece begins a
    word. If given, whole words are selected, up to this number of tokens. A row without ordinary tokens is unchanged.
    """
    ids = np.asarray(ids, dtype=np.int64)
    ordinary = np.flatnonzero(ids > MASK)
    targets = np.full(len(ids), PAD, dtype=np.int64)
    if not len(ordinary):
        return RowExample(ids, targets)
    wanted = max(1, int(len(ordinary) * rate + draw.random()))
    chosen = draw.permutation(ordinary)[:wanted] if starts is None else _words(ids, ordinary, starts, draw, wanted)
    targets[chosen] = ids[chosen]
    fate, other = draw.random(len(chosen)), draw.integers(MASK + 1, max(vocab_size, MASK + 2), len(chosen))
    hidden = ids.copy()
    as_mask = fate < SHOWN_AS_MASK
    as_random = ~as_mask & (fate < SHOWN_AS_MASK + SHOWN_AS_RANDOM)
    hidden[chosen[as_mask]] = MASK
    hidden[chosen[as_random]] = other[as_random]
    return RowExample(hidden, targets)


def _words(
    ids: np.ndarray, ordinary: np.ndarray, starts: np.ndarray, draw: np.random.Generator, wanted: int
) -> np.ndarray:
    """Draw random words: at least one, and more up to `wanted` tokens. Returns the positions of their tokens."""
    begins = starts[ids[ordinary]] | (np.diff(ordinary, prepend=-2) != 1)  # words do not continue across special tokens
    words = np.split(ordinary, np.flatnonzero(begins)[1:])
    chosen: list[np.ndarray] = []
    left = wanted
    for i in draw.permutation(len(words)):
        if len(words[i]) <= left or not chosen:
            chosen.append(words[i])
            left -= len(words[i])
        if left <= 0:
            break
    return np.concatenate(chosen)


def word_starts(pieces: Sequence[str]) -> np.ndarray | None:
    """For each id, whether its piece begins a word; None if the vocabulary does not mark words.

    U+2581 (SentencePiece) and U+0120 (byte-level BPE) mark the first piece of a word, ## (WordPiece) all other pieces.
    """
    marks = np.array([piece.startswith(("\u2581", "\u0120")) for piece in pieces])
    if marks.any():
        return marks
    continues = np.array([piece.startswith("##") for piece in pieces])
    return ~continues if continues.any() else None


class _Tensors:
    """Base class of the batches of all tasks."""

    __slots__ = ()

    @property
    def n_rows(self: Any) -> int:
        return len(self.inputs[0])

    def to(self: BatchT, device: torch.device | str) -> BatchT:
        """Move the batch to a device. A copy to a GPU is made from pinned memory, and the CPU does not wait for it."""
        batch: Any = self
        if torch.device(device).type == batch.inputs[0].device.type == "cpu":
            return self
        return replace(batch, **{field.name: _sent(getattr(self, field.name), device) for field in fields(batch)})


@dataclass(frozen=True, slots=True)
class Batch(_Tensors):
    """A batch of sentence pairs, padded on the right with `PAD`."""

    src: SourceInput  # ids EOS, or vectors
    tgt_in: Int64[Tensor, "B T"]  # BOS ids
    tgt_out: Int64[Tensor, "B T"]  # ids EOS
    n_targets: int  # number of tokens in tgt_out without padding, by which a loss is divided
    links: Int64[Tensor, "L 3"] | None = None  # row, position in tgt_in, position in src, for guided alignment

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.src, self.tgt_in

    @property
    def targets(self) -> Tensor:
        return self.tgt_out

    def part(self, start: int, stop: int) -> Batch:
        src, tgt_in, tgt_out = (_trimmed(side[start:stop]) for side in (self.src, self.tgt_in, self.tgt_out))
        links = self.links
        if links is not None:
            links = links[(links[:, 0] >= start) & (links[:, 0] < stop)]
            links = torch.cat([links[:, :1] - start, links[:, 1:]], dim=1)
        return Batch(src, tgt_in, tgt_out, int((tgt_out != PAD).sum()), links)


@dataclass(frozen=True, slots=True)
class RowBatch(_Tensors):
    """Rows of running text, padded on the right with `PAD`.

    inputs: ids [B, T] and, if attention is limited to documents, the number of each token's document [B, T].
    """

    inputs: tuple[Tensor, ...]
    targets: Int64[Tensor, "B T"]
    n_targets: int

    def part(self, start: int, stop: int) -> RowBatch:
        width = _trimmed(self.inputs[0][start:stop]).shape[1]
        *inputs, targets = (tensor[start:stop, :width] for tensor in (*self.inputs, self.targets))
        return RowBatch(tuple(inputs), targets, int((targets != PAD).sum()))


@dataclass(frozen=True, slots=True)
class MaskedBatch(_Tensors):
    """Pairs of segments with masked tokens. `places`: row * S + column of each token to predict; `targets`: its id.

    `labels` [B]: FOLLOWS or RANDOM, for next-sentence prediction. `targets_per_pair`: masked tokens per pair in the
    whole update, so that both losses are means over the update, independent of its split into batches.
    """

    ids: Int64[Tensor, "B S"]
    segments: Int64[Tensor, "B S"]
    places: Int64[Tensor, " N"]
    targets: Int64[Tensor, " N"]
    labels: Int64[Tensor, " B"]
    targets_per_pair: float

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.ids, self.segments, self.places

    @property
    def n_targets(self) -> int:
        return len(self.targets)

    def part(self, start: int, stop: int) -> MaskedBatch:
        ids = _trimmed(self.ids[start:stop])
        row, column = self.places // self.ids.shape[1], self.places % self.ids.shape[1]
        here = (row >= start) & (row < stop)
        places = (row[here] - start) * ids.shape[1] + column[here]
        segments, labels = self.segments[start:stop, : ids.shape[1]], self.labels[start:stop]
        return MaskedBatch(ids, segments, places, self.targets[here], labels, self.targets_per_pair)


@dataclass(frozen=True, slots=True)
class LabelBatch(_Tensors):
    """A batch of labelled texts. `targets` are the indices of the labels."""

    ids: SourceInput
    segments: Int64[Tensor, "B S"]
    targets: Int64[Tensor, " B"]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.ids, self.segments

    @property
    def n_targets(self) -> int:
        return len(self.targets)

    def part(self, start: int, stop: int) -> LabelBatch:
        ids = _trimmed(self.ids[start:stop])
        return LabelBatch(ids, self.segments[start:stop, : ids.shape[1]], self.targets[start:stop])


TrainingBatch = Batch | RowBatch | MaskedBatch | LabelBatch


def collate(examples: Sequence[Example]) -> Batch:
    """Add `BOS` and `EOS` to the examples, shift the targets, and pad all to one batch. Examples may be empty.

    >>> collate([Example(src=[5, 6], tgt=[7])]).tgt_in.tolist()
    [[2, 7]]
    """
    tgt = [example.tgt for example in examples]
    src, tgt_in, tgt_out = pad_sources([e.src for e in examples]), pad_rows(tgt, bos=True), pad_rows(tgt, eos=True)
    return Batch(src, tgt_in, tgt_out, sum(map(len, tgt)) + len(tgt), _links(examples))


def _links(examples: Sequence[Example]) -> Int64[Tensor, "L 3"] | None:
    """Join the links of all examples: row, position in `tgt_in`, position in `src`. None if no example has links."""
    parts = [
        np.insert(example.links[:, ::-1] + (1, 0), 0, row, axis=1)
        for row, example in enumerate(examples)
        if example.links is not None
    ]
    return torch.from_numpy(np.concatenate(parts, dtype=np.int64)) if parts else None


def pad_sources(sentences: Sequence[Ids], *, eos: bool = True) -> SourceInput:
    """Pad the inputs of an encoder: ids with `PAD`, after an EOS unless `eos` is false; vectors with NaN."""
    vectors = [torch.tensor(rows) for rows in sentences if isinstance(rows, np.ndarray) and rows.ndim == 2]
    if not vectors:
        return pad_rows(sentences, eos=eos)
    return pad_sequence(vectors, batch_first=True, padding_value=torch.nan)


def collate_rows(examples: Sequence[RowExample], *, separate: bool = False) -> RowBatch:
    """Pad rows to the longest row. `separate`: also return the number of each token's document within its row.

    Documents begin with `BOS`.

    >>> collate_rows([RowExample([2, 5], [5, 3]), RowExample([6], [7])]).targets.tolist()
    [[5, 3], [7, 0]]
    """
    ids, targets = pad_rows([example.ids for example in examples]), pad_rows([example.targets for example in examples])
    inputs = (ids, (ids == BOS).cumsum(1)) if separate else (ids,)
    return RowBatch(inputs, targets, int((targets != PAD).sum()))


def collate_masked(
    rows: Sequence[RowExample], segments: Sequence[np.ndarray], labels: Sequence[int], *, targets_per_pair: float
) -> MaskedBatch:
    ids, kinds = pad_rows([row.ids for row in rows]), pad_rows(segments)
    targets = pad_rows([row.targets for row in rows]).flatten()
    places = (targets != PAD).nonzero()[:, 0]
    return MaskedBatch(ids, kinds, places, targets[places], torch.tensor(list(labels)), targets_per_pair)


def collate_labelled(examples: Sequence[Packed], labels: Sequence[int]) -> LabelBatch:
    ids, segments = pad_sources([e.ids for e in examples], eos=False), pad_rows([e.segments for e in examples])
    return LabelBatch(ids, segments, torch.tensor(list(labels), dtype=torch.long))


def pad_rows(rows: Sequence[Ids], *, bos: bool = False, eos: bool = False) -> Int64[Tensor, "B S"]:
    """Pad rows on the right with `PAD`. `bos`, `eos`: also put `BOS` before, or `EOS` after, each row.

    >>> pad_rows([[5], [6, 7]], eos=True).tolist()
    [[5, 3, 0], [6, 7, 3]]
    """
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))[:, None]
    padded = np.full((len(rows), int(lengths.max(initial=0)) + bos + eos), PAD, dtype=np.int64)
    columns = np.arange(padded.shape[1]) - bos
    if rows:
        padded[(columns >= 0) & (columns < lengths)] = np.concatenate(rows, dtype=np.int64, casting="unsafe")
    if bos:
        padded[:, 0] = BOS
    if eos:
        padded[columns == lengths] = EOS
    return torch.from_numpy(padded)


def _trimmed(rows: Tensor) -> Tensor:
    """Remove columns on the right that are padding in all rows."""
    filled = is_real(rows).any(0).nonzero()
    return rows[:, : int(filled[-1]) + 1 if len(filled) else 0]


def _sent(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, tuple):
        return tuple(_sent(tensor, device) for tensor in value)
    if not isinstance(value, Tensor):
        return value
    to_gpu = torch.device(device).type == "cuda"
    return (value.pin_memory() if to_gpu else value).to(device, non_blocking=True)
