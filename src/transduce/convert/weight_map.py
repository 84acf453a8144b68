"""A weight map: which of another program's tensors make up each of ours, with shapes. It is used in both directions.

No tensor is ignored silently: everything missing, unexpected, of the wrong shape or contradictory is listed at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from transduce.errors import UserError

Shape = tuple[int, ...]

_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Supported types of weights. Eight-bit formats come with their own scales, which are not read."""


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


def rows_of(ids: Mapping[str, int], special: Sequence[int], *, n: int, origin: object) -> Rows:
    """The rows of a vocabulary with these ids; `UserError` where it contradicts itself or the model.

    `special`: their ids of our first ids, -1 for none. n: rows of their embedding; ids without a piece keep their rows.
    """
    if any(type(i) is not int or not 0 <= i < n for i in ids.values()):
        raise UserError(f"{origin}: the vocabulary has ids outside 0 .. {n - 1}, the vocab_size in config.json")
    if len(set(ids.values())) < len(ids):
        raise UserError(f"{origin}: two pieces have one id")
    n_pieces = max(ids.values(), default=-1) + 1
    if n_pieces != n and (n % 8 or n - n_pieces > 127):  # rows may be padded to a round number
        raise UserError(
            f"{origin}: the vocabulary has {n_pieces:,} pieces, and config.json says vocab_size {n:,}: it belongs to "
            "another model"
        )
    taken = set(special)
    return Rows(torch.tensor([*special, *(i for i in range(n) if i not in taken)]), n)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One tensor of ours and its counterpart.

    `theirs`: names of tensors of this `shape`, which are concatenated along the first axis to make ours.
    `also`: other names of a single tensor. At least one name must exist; all that exist must be equal; the first is
    written. `tied`: our other names of it. `rows`: for a vocabulary, their row of each of our rows, or -1 for none,
    which is filled with `filler`. `stream`: our axis that lies on the residual stream, whose order may differ. `flat`:
    theirs has more axes, of size 1. `transposed`: theirs is [in, out].
    """

    ours: str
    theirs: tuple[str, ...]
    shape: Shape
    also: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
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


def check(tensors: Mapping[str, Tensor], entries: Sequence[Entry], *, origin: object) -> None:
    """`UserError` with every name and shape that does not fit."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    missing, misshapen, expected = [], [], set[str]()
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
    order: Int[Tensor, " D"] | None = None,
) -> dict[str, Tensor]:
    """Our tensors, float32, from theirs, which passed `check`. `UserError` for values that cannot be used.

    `order`: our column for each column of their residual stream, where they differ.
    """
    bad = [name for name, t in tensors.items() if t.dtype not in _TYPES or not bool(t.isfinite().all())]
    if bad:
        raise UserError(f"{origin}: weights that are not finite numbers of 16, 32 or 64 bits: {_listed(bad)}")
    inverse = None if order is None else order.argsort()
    ours, differing = dict[str, Tensor](), []
    for entry in entries:
        names = [name for name in (*entry.theirs, *entry.also) if name in tensors]
        if entry.also and any(not torch.equal(tensors[names[0]], tensors[name]) for name in names[1:]):
            differing.append(" and ".join(names))
        parts = [tensors[name] for name in (names[:1] if entry.also else entry.theirs)]
        ours |= dict.fromkeys((entry.ours, *entry.tied), _to_ours(torch.cat(parts).float(), entry, inverse))
    if differing:
        raise UserError(f"{origin}: these weights are tied in config.json, but differ: {'; '.join(differing)}")
    return ours


def write(
    ours: Mapping[str, Tensor], entries: Sequence[Entry], *, order: Int[Tensor, " D"] | None = None
) -> dict[str, Tensor]:
    """Their tensors, float32, from ours: the inverse of `read`. A bias that our model does not have becomes zeros."""
    unknown = ours.keys() - {name for entry in entries for name in (entry.ours, *entry.tied)}
    assert not unknown, f"no entry for {sorted(unknown)}"
    theirs: dict[str, Tensor] = {}
    for entry in entries:
        if entry.ours not in ours and entry.ours.endswith("bias"):
            theirs |= {name: torch.zeros(entry.shape) for name in entry.theirs}
            continue
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
