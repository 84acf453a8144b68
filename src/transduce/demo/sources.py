"""The built-in corpus as the text of a run."""

from __future__ import annotations

from collections.abc import Iterator

from transduce.data.corpus import Pair
from transduce.data.sources import Source, Sources
from transduce.demo.corpus import demo_pairs

HELD_OUT = 500
"""Pairs of each held-out split."""


def demo_sources(n: int, *, seed: int) -> Sources[Pair]:
    """`n` training pairs, and the held-out splits."""
    valid, *tests = (_source(split, HELD_OUT, seed) for split in ("valid", "test", "held_out_combinations"))
    return Sources((_source("train", n, seed),), (valid,), tuple(tests))


def _source(split: str, n: int, seed: int) -> Source[Pair]:
    """The first `n` pairs of a split. It needs no digest: the settings determine the pairs."""

    def read() -> Iterator[Pair]:
        for number, pair in enumerate(demo_pairs(split, n, seed=seed), 1):
            yield Pair(pair.src, pair.tgt, f"built-in corpus, {split}", number)

    return Source(split, read, ("built-in corpus",) if split == "train" else ())
