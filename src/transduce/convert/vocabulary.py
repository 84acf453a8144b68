"""Vocabularies of other programs: their ids and ours, which have the special ones in front.

Marian has eos 0, unk 1 and pad, which starts its decoder and is never written; ours are PAD, UNK, BOS, EOS = 0 .. 3.
BOS is their pad. Our PAD, which nothing reads or writes, has no row there, unless a model of ours is on its way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from transduce.errors import UserError
from transduce.text.special import BOS, EOS, PAD, SPECIAL_PIECES, UNK

NEVER = -1e4
"""The bias on the logit of an id that exists on one side only."""

NULL = "<null>"
"""What our PAD is called in an exported vocabulary, where its row must be kept for the model to come back unchanged."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Their row of each of our ids (-1: none), and how many they have."""

    index: Int[Tensor, " V"]
    n_theirs: int

    @property
    def has_null(self) -> bool:
        """Whether our PAD has a row there."""
        return int(self.index[PAD]) >= 0


def from_theirs(
    ids: Mapping[str, int], *, n: int, special: Mapping[int, int], origin: object
) -> tuple[list[str], Rows]:
    """Our pieces and their rows, from their ids of pieces.

    n: rows of their embedding. special: their id of our UNK, BOS and EOS. A `UserError` tells a contradiction.
    """
    if any(type(i) is not int or not 0 <= i < n for i in ids.values()):
        raise UserError(f"{origin}: has ids outside 0 .. {n - 1}, the vocab_size that config.json says")
    names = {i: piece for piece, i in ids.items()}
    if len(names) < len(ids):
        raise UserError(f"{origin}: two pieces have one id")
    if len(set(special.values())) < len(special) or not all(0 <= i < n for i in special.values()):
        raise UserError(f"{origin}: unknown, pad and end of sentence need three ids within 0 .. {n - 1}: {special}")
    null = ids.get(NULL)
    taken = {*special.values()} | ({null} if null is not None else set())
    others = [i for i in range(n) if i not in taken]
    index = [-1 if null is None else null, special[UNK], special[BOS], special[EOS], *others]
    pieces = [*SPECIAL_PIECES, *(names.get(i, f"<unnamed {i}>") for i in others)]
    return pieces, Rows(torch.tensor(index), n)


def to_theirs(pieces: Sequence[str], *, keep_null: bool, pad_last: bool) -> tuple[dict[str, int], Rows]:
    """Their ids of our pieces: eos 0, unk 1, pad last or third, the others in our order."""
    pad, null = [("<pad>", BOS)], [(NULL, PAD)] if keep_null else []
    others = [(piece, i) for i, piece in enumerate(pieces) if i > EOS]
    head = [("</s>", EOS), ("<unk>", UNK)]
    order = [*head, *others, *null, *pad] if pad_last else [*head, *pad, *others, *null]
    ids = {piece: row for row, (piece, _) in enumerate(order)}
    if len(ids) < len(order):
        raise UserError(
            f"the vocabulary holds a piece twice, or one of {NULL}, <pad>, <unk>, </s> as an ordinary piece"
        )
    index = torch.full((len(pieces),), -1)
    index[torch.tensor([i for _, i in order])] = torch.arange(len(order))
    return ids, Rows(index, len(order))
