"""What is to be known of each kind of model without making one; `build.MODELS` makes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of model.

    family: kinds of one family have the same names for what they share, so that one can begin with another's weights.
    attention: products d_model x d_model in a block of the encoder and of the decoder; 0: it has no such stack.
    """

    family: str
    attention: tuple[int, int]


KINDS: dict[str, Kind] = {
    "transformer": Kind("an encoder and a decoder", (4, 8)),
    "gpt": Kind("a decoder alone", (0, 4)),
    "bert": Kind("an encoder alone", (4, 0)),
    "bert-encoder": Kind("an encoder alone", (4, 0)),
    "bert-classifier": Kind("an encoder alone", (4, 0)),
}


def n_blocks(kind: str, *, encoder: int, decoder: int) -> str:
    """How many blocks a model of a kind has, for people, of the numbers that its settings name.

    >>> n_blocks("bert", encoder=2, decoder=4), n_blocks("transformer", encoder=2, decoder=4)
    ('2', '2 + 4')
    """
    there = zip(KINDS[kind].attention, (encoder, decoder), strict=True)
    return " + ".join(str(n) for products, n in there if products)


def kinds_of(family: str) -> tuple[str, ...]:
    """The kinds of one family.

    >>> kinds_of("a decoder alone")
    ('gpt',)
    """
    return tuple(name for name, kind in KINDS.items() if kind.family == family)
