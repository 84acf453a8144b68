"""A weight map: which of another program's tensors make up each of ours, with shapes. It is used in both directions.

No tensor is ignored silently: everything missing, unexpected, of the wrong shape or contradictory is listed at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from transduce.errors import UserError

Shape = tuple[int, ...]

_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Supported types of weights. Eight-bit formats come with scales of their own, which are not read."""


_PADDED_TO, _MAX_PADDING = 8, 127

NEVER = -1e4
"""The bias on the logit of an id that exists on one side only."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Their row of each of our ids (-1: none), and the number of their rows."""

    index: Int[Tensor, " V"]
    n_theirs: int

    @classmethod
    def of_size(cls, n: int) -> Rows:
        """Rows for checking shapes only, before the vocabulary is read."""
        return cls(torch.zeros(0, dtype=torch.long), n)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One tensor of ours and its counterpart.

    `theirs`: names of tensors of this `shape`, which are concatenated along the first axis to make ours.
    `also`: other names of a single tensor. At least one name must exist; all that exist must be equal; the first is
    written. `rows`: for a vocabulary, their row of each of our rows, or -1 for none, which is filled with `filler`.
    `stream`: our axis that lies on the residual stream, whose order may differ. `flat`: theirs has more axes, of
    size 1. `transposed`: theirs is [in, out].
    """

    ours: str
    theirs: tuple[str, ...]
    shape: Shape
    also: tuple[str, ...] = ()
    rows: Int[Tensor, " V"] | None = None
    filler: float = 0.0
    stream: int | None = None
    flat: bool = False
    transposed: bool = False


def linear(ours: str, theirs: tuple[str, ...], shape: tuple[int, int], *, stream: int | None = None) -> list[Entry]:
    """Weight and bias of a linear layer. `stream`: the weight's axis on the residual stream."""
    on_stream = 0 if stream == 0 else None  # the bias has the weight's first axis
    return [
        Entry(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), shape, stream=stream),
        Entry(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs), shape[:1], stream=on_stream),
    ]


def norm(ours: str, theirs: str, d: int, *, stream: int | None = None) -> list[Entry]:
    """Weight and bias of a norm. Files converted from TensorFlow call them gamma and beta."""
    names = (("weight", "gamma"), ("bias", "beta"))
    return [Entry(f"{ours}.{a}", (f"{theirs}.{a}",), (d,), also=(f"{theirs}.{b}",), stream=stream) for a, b in names]


def check(
    tensors: Mapping[str, Tensor], entries: Sequence[Entry], *, origin: object, known: Iterable[str] = ()
) -> None:
    """`UserError` with every name and shape that does not fit. `known`: names that may exist without an entry."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    missing, misshapen, expected = [], [], set(known)
    for entry in entries:
        expected |= {*entry.theirs, *entry.also}
        for name in entry.theirs:
            if name not in shapes and not any(other in shapes for other in entry.also):
                missing.append(f"{name} {list(entry.shape)}")
        for name in (*entry.theirs, *entry.also):
            if name in shapes and shapes[name] != entry.shape:
                misshapen.append(f"{name} is {list(shapes[name])}, should be {list(entry.shape)}")
    unexpected = [f"{name} {list(shape)}" for name, shape in shapes.items() if name not in expected]
    lists = (("missing", missing), ("misshapen", misshapen), ("unexpected", unexpected))
    if problems := [f"{len(names)} {what}: {_listed(names)}" for what, names in lists if names]:
        raise UserError(f"{origin}: config.json and the weights do not fit: {'; '.join(problems)}")


def read(
    tensors: Mapping[str, Tensor],
    entries: Sequence[Entry],
    *,
    origin: object,
    known: Iterable[str] = (),
    order: Int[Tensor, " D"] | None = None,
) -> dict[str, Tensor]:
    """Our tensors, float32, from theirs. `UserError` lists everything that does not fit.

    `order`: our column for each column of their residual stream, where they differ.
    """
    check(tensors, entries, origin=origin, known=known)
    bad = [name for name, t in tensors.items() if t.dtype not in _TYPES or not bool(t.isfinite().all())]
    if bad:
        raise UserError(f"{origin}: weights that are not finite numbers of 16, 32 or 64 bits: {_listed(bad)}")
    inverse = None if order is None else order.argsort()
    ours, differing = {}, []
    for entry in entries:
        names = [name for name in (*entry.theirs, *entry.also) if name in tensors]
        if entry.also and any(not torch.equal(tensors[names[0]], tensors[name]) for name in names[1:]):
            differing.append(" and ".join(names))
        parts = [tensors[name] for name in (names[:1] if entry.also else entry.theirs)]
        ours[entry.ours] = _to_ours(torch.cat(parts).float(), entry, inverse)
    if differing:
        raise UserError(f"{origin}: these weights are tied in config.json, but differ: {'; '.join(differing)}")
    return ours


def write(
    ours: Mapping[str, Tensor], entries: Sequence[Entry], *, order: Int[Tensor, " D"] | None = None
) -> dict[str, Tensor]:
    """Their tensors, float32, from ours: the inverse of `read`."""
    unknown = ours.keys() - {entry.ours for entry in entries}
    assert not unknown, f"no entry for {sorted(unknown)}"
    theirs: dict[str, Tensor] = {}
    for entry in entries:
        value = ours[entry.ours].detach().cpu().float()
        if entry.stream is not None and order is not None:
            value = value.index_select(entry.stream, order)
        if entry.rows is not None:
            exists = entry.rows >= 0
            moved = value.new_empty(int(entry.rows.max()) + 1, *value.shape[1:])
            moved[entry.rows[exists]] = value[exists]
            value = moved
        if entry.transposed:
            value = value.t()
        for name, part in zip(entry.theirs, value.chunk(len(entry.theirs)), strict=True):
            theirs[name] = part.reshape(entry.shape).contiguous()
    return theirs


def check_padding(n_pieces: int, *, n: int, origin: object) -> None:
    """Refuse a vocabulary with fewer pieces than the model has rows, unless the rows are padded to a round number."""
    if n_pieces != n and (n % _PADDED_TO or n - n_pieces > _MAX_PADDING):
        raise UserError(
            f"{origin}: the vocabulary has {n_pieces:,} pieces, and config.json says vocab_size {n:,}: it belongs to "
            "another model"
        )


def type_note(tensors: Mapping[str, Tensor]) -> str:
    """A line on the types of the weights, for the model card."""
    types = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    return f"weights of type {', '.join(types)}, kept as float32"


def _to_ours(value: Tensor, entry: Entry, inverse: Tensor | None) -> Tensor:
    if entry.flat:
        value = value.flatten()
    if entry.transposed:
        value = value.t()
    if entry.rows is not None:
        exists = entry.rows >= 0
        moved = value.new_full((len(entry.rows), *value.shape[1:]), entry.filler)
        moved[exists] = value[entry.rows[exists]]
        value = moved
    if entry.stream is not None and inverse is not None:
        value = value.index_select(entry.stream, inverse)
    return value.contiguous()


def _listed(names: Sequence[str], most: int = 1000) -> str:
    """Names from a file in one line, each cut at 200 characters."""
    more = f", and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(name if len(name) <= 200 else f"{name[:200]}…" for name in names[:most]) + more
