"""The text of a translation task: that of files, or of the built-in corpus."""

from __future__ import annotations

from collections.abc import Iterator

from transduce.config.settings import Settings
from transduce.data.corpus import Pair
from transduce.data.sources import Source, Sources, pair_sources
from transduce.demo.corpus import demo_pairs

HELD_OUT = 500
"""Pairs of each held-out split of the built-in corpus."""


def translation_sources(settings: Settings) -> Sources[Pair]:
    """The sentence pairs that the settings name."""
    n, seed = settings.data.demo, settings.training.seed
    if not n:
        return pair_sources(settings)
    valid, *tests = (_source(split, HELD_OUT, seed) for split in ("valid", "test", "held_out_combinations"))
    return Sources((_source("train", n, seed),), (valid,), tuple(tests))


def _source(split: str, n: int, seed: int) -> Source[Pair]:
    """The first `n` pairs of a split. It needs no digest: the settings determine the pairs."""

    def read() -> Iterator[Pair]:
        for number, pair in enumerate(demo_pairs(split, n, seed=seed), 1):
            yield Pair(pair.src, pair.tgt, (f"built-in corpus, {split}", number))

    return Source(split, read, ("built-in corpus",) if split == "train" else ())
