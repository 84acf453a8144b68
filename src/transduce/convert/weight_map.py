"""A model of another program as a table: which of their tensors make up which of ours, with shapes.

The table is read in both directions. Nothing is loaded in silence: what is missing, left over, misshapen or
contradictory is told all at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from transduce.convert.limits import listed
from transduce.errors import UserError

Shape = tuple[int, ...]

ACTIVATIONS = {  # theirs to ours; the first of each is written
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
    "silu": "silu",
}


_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types of weights; numbers of eight bits come with scales of their own, which are not read here."""


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """One tensor of ours, and what it is of theirs.

    `theirs` stand one below another in ours, each of `shape`. `also`: other names of a single one; of all its names at
    least one must be there, and all that are there must be equal; it is written under the first.
    `rows`: for a vocabulary, their row of each of our rows; -1 where they have none, which becomes `filler`.
    `stream`: our axis that lies on the residual stream, whose order may differ. `flat`: theirs has axes of size 1 more.
    `transposed`: theirs is [in, out], as GPT-2 keeps its matrices.
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


def problems(found: Mapping[str, Shape], lines: Sequence[Line], *, known: Iterable[str] = ()) -> list[str]:
    """What is missing, left over or misshapen in `found`; `known` are names that need not be there and may."""
    missing, misshapen, expected = [], [], set(known)
    for line in lines:
        expected |= {*line.theirs, *line.also}
        for name in line.theirs:
            if name not in found and not any(other in found for other in line.also):
                missing.append(f"{name} {list(line.shape)}")
        for name in (*line.theirs, *line.also):
            if name in found and found[name] != line.shape:
                misshapen.append(f"{name} is {list(found[name])}, should be {list(line.shape)}")
    left = [f"{name} {list(shape)}" for name, shape in found.items() if name not in expected]
    told = (("missing", missing), ("misshapen", misshapen), ("left over", left))
    return [f"{len(names)} {what}: {listed(names)}" for what, names in told if names]


def check(tensors: Mapping[str, Tensor], lines: Sequence[Line], *, origin: object, known: Iterable[str] = ()) -> None:
    """A `UserError` lists everything in the names and shapes that does not fit; of `rows`, their number counts only."""
    told = problems({name: tuple(t.shape) for name, t in tensors.items()}, lines, known=known)
    if told:
        raise UserError(f"{origin}: config.json and the weights do not fit: {'; '.join(told)}")


def read(
    tensors: Mapping[str, Tensor],
    lines: Sequence[Line],
    *,
    origin: object,
    known: Iterable[str] = (),
    order: Int[Tensor, " D"] | None = None,
) -> dict[str, Tensor]:
    """Our tensors, float32, from theirs. A `UserError` lists everything that does not fit.

    `order`: our column of each column of their residual stream, where they differ.
    """
    check(tensors, lines, origin=origin, known=known)
    bad = [name for name, t in tensors.items() if t.dtype not in _TYPES or not bool(t.isfinite().all())]
    if bad:
        raise UserError(f"{origin}: weights that are not finite numbers of 16, 32 or 64 bits: {listed(bad)}")
    back = None if order is None else order.argsort()
    ours, differing = {}, []
    for line in lines:
        names = [name for name in (*line.theirs, *line.also) if name in tensors]
        if line.also and any(not torch.equal(tensors[names[0]], tensors[name]) for name in names[1:]):
            differing.append(" and ".join(names))
        parts = [tensors[name] for name in (names[:1] if line.also else line.theirs)]
        ours[line.ours] = _to_ours(torch.cat(parts).float(), line, back)
    if differing:
        raise UserError(f"{origin}: config.json says that these are one, and they differ: {'; '.join(differing)}")
    return ours


def write(
    ours: Mapping[str, Tensor], lines: Sequence[Line], *, order: Int[Tensor, " D"] | None = None
) -> dict[str, Tensor]:
    """Their tensors, float32, from ours: the inverse of `read`."""
    left = ours.keys() - {line.ours for line in lines}
    assert not left, f"the table does not know of {sorted(left)}"
    theirs: dict[str, Tensor] = {}
    for line in lines:
        value = ours[line.ours].detach().cpu().float()
        if line.stream is not None and order is not None:
            value = value.index_select(line.stream, order)
        if line.rows is not None:
            there = line.rows >= 0
            moved = value.new_empty(int(line.rows.max()) + 1, *value.shape[1:])
            moved[line.rows[there]] = value[there]
            value = moved
        if line.transposed:
            value = value.t()
        for name, part in zip(line.theirs, value.chunk(len(line.theirs)), strict=True):
            theirs[name] = part.reshape(line.shape).contiguous()
    return theirs


def _to_ours(value: Tensor, line: Line, back: Tensor | None) -> Tensor:
    if line.flat:
        value = value.flatten()
    if line.transposed:
        value = value.t()
    if line.rows is not None:
        there = line.rows >= 0
        moved = value.new_full((len(line.rows), *value.shape[1:]), line.filler)
        moved[there] = value[line.rows[there]]
        value = moved
    if line.stream is not None and back is not None:
        value = value.index_select(line.stream, back)
    return value.contiguous()
