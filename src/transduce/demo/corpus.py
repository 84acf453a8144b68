"""The built-in corpus: endless English and German sentence pairs from a synchronous grammar.

It needs no file and no network, and covers what makes translation hard: verb-final and verb-second clauses, split
verbs, agreement, gender, case, adjective endings, compounds, numbers, dates, negation, questions, relative clauses, and
pronouns with the gender of their noun.

Every English sentence has exactly one German translation, so exact match is a fair score. Where German allows several,
a convention decides: "you" is du, the simple past is the preterite, the present perfect the perfect, time comes before
objects and place after them, subordinate clauses begin with their subject, and articles contract (im, zum).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from random import Random
from zlib import crc32

from transduce.data.corpus import Pair
from transduce.data.sources import Source, Sources
from transduce.demo.grammar import Combination, Symbol, derive
from transduce.demo.lexicon import grammar, rows

SPLITS = ("train", "valid", "test", "held_out_combinations")
HELD_OUT = 500
"""Pairs of each held-out split."""

# One in so many combinations of a kind never occurs in train, valid or test.
_RESERVED = {"adjective": 16, "object": 16, "compound": 12, "number": 12, "separable": 8}


@dataclass(frozen=True, slots=True)
class DemoPair:
    """A sentence pair. `structure`: the kind of sentence, as "passive"."""

    src: str
    tgt: str
    structure: str


@cache
def is_reserved(combination: Combination) -> bool:
    """Whether a combination of two words is kept out of train, valid and test."""
    kind, first, second = combination
    if (kind == "separable" and "+" not in first) or (kind == "number" and not (first.isdigit() and len(first) < 3)):
        return False  # numbers over 99 are too rare to be sure that training contains all their parts
    return bool(first and second) and crc32("\t".join(combination).encode()) % _RESERVED[kind] == 0


def demo_pairs(split: str, n: int, *, seed: int) -> Iterator[DemoPair]:
    """Generate `n` pairs of a split: train, valid, test or held_out_combinations.

    The same arguments give the same pairs, and a longer draw begins with the shorter one. No pair is in two splits.
    Train, valid and test contain no reserved combination of words; every pair of held_out_combinations contains at
    least one. Only train may contain a pair twice.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: must be one of {', '.join(SPLITS)}")
    pairs = (pair for pair, where, _ in _stream(f"{split} {seed}") if where == split)
    return islice(pairs if split == "train" else _distinct(pairs), n)


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


def _distinct(pairs: Iterator[DemoPair]) -> Iterator[DemoPair]:
    seen: set[str] = set()
    for pair in pairs:
        if pair.src not in seen:
            seen.add(pair.src)
            yield pair


def _stream(seed: str) -> Iterator[tuple[DemoPair, str, list[Combination]]]:
    """Pairs with the split that each belongs to and its combinations of words."""
    random, start = Random(seed), grammar().symbol("sentence")
    contractions = {f"{preposition} {article}": both for preposition, article, both in rows("contraction")}
    while True:
        rule = start.choose(random)
        structure = rule.call[0] if isinstance(rule, Symbol) else "sentence"
        pair = derive(rule, random, contractions)
        src, tgt = _text(pair.src), _text(pair.tgt)
        if any(map(is_reserved, pair.met)):
            where = "held_out_combinations"
        else:
            where = ("valid", "test", *["train"] * 14)[crc32(src.encode()) >> 28]
        yield DemoPair(src, tgt, structure), where, pair.met


def _text(tokens: list[str]) -> str:
    """Join words: a capital at the start of each sentence, no space before punctuation, "an" before a vowel."""
    text = re.sub(r" ([.,?])", r"\1", " ".join(tokens))
    text = re.sub(r"(?<!\S)a (?=[aeiou])", "an ", text)
    return re.sub(r"(^|\? )(\w)", lambda m: m[1] + m[2].upper(), text)
