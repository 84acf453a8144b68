"""The built-in corpus: English and German sentence pairs without end, from a synchronous grammar.

It needs no file and no network, and it is hard in the ways in which translation is: verb-final clauses, verb-second
order after a fronted adjunct, verbal brackets, agreement, gender, case, adjective endings, separable verbs, compounds,
numbers, dates and clock times in words, negation, questions, relative clauses, pronouns with the gender of their noun.

Every English sentence of the grammar has exactly one derivation, hence one German sentence: exact match is a fair
score. Where real German would allow more than one, a convention decides: "you" is du, the simple past is the preterite,
the present perfect is the perfect, time stands before nominal objects and place behind them, subordinate clauses begin
with their subject, and articles are contracted where they can be (im, zum).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from random import Random
from zlib import crc32

from transduce.demo.complex import start
from transduce.demo.lexicon import lexicon
from transduce.demo.rules import Combination, derive

SPLITS = ("train", "valid", "test", "held_out_combinations")
# One in so many combinations of a kind is never in train, valid or test.
_RESERVED = {"adjective": 16, "object": 16, "compound": 12, "number": 12, "separable": 8}
_WORDS = re.compile(r"[^\W_]+(?:['-][^\W_]+)*|[^\w\s]")


@dataclass(frozen=True, slots=True)
class DemoPair:
    """A sentence pair. `alignment`: places in `words(src)` and `words(tgt)` that belong together; `structure`: the kind
    of sentence."""

    src: str
    tgt: str
    alignment: tuple[tuple[int, int], ...]
    structure: str


def words(text: str) -> list[str]:
    """The words that alignments count: split at spaces, punctuation apart.

    >>> words("At seven o'clock, Anna's twenty-one guests came.")
    ['At', 'seven', "o'clock", ',', "Anna's", 'twenty-one', 'guests', 'came', '.']
    """
    return _WORDS.findall(text)


@cache
def is_reserved(combination: Combination) -> bool:
    """Whether a combination of two lexemes is kept out of train, valid and test."""
    kind, first, second = combination
    if (kind == "separable" and "+" not in first) or (kind == "number" and len(first) > 2):
        return (
            False  # only separable verbs have forms to hold out; large numbers are too rare to be sure of in training
        )
    return bool(first and second) and crc32("\t".join(combination).encode()) % _RESERVED[kind] == 0


def demo_pairs(split: str, n: int, *, seed: int) -> Iterator[DemoPair]:
    """`n` pairs of a split, one by one; the same for the same arguments, and a longer draw begins with the shorter.

    No pair of train, valid and test is ever in another of them: a hash of the source decides. Their sentences hold no
    reserved combination of lexemes, those of held_out_combinations at least one. No pair comes twice, but in train.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: must be one of {', '.join(SPLITS)}")
    pairs = (pair for pair, where, _ in _stream(f"{split} {seed}") if where == split)
    return islice(pairs if split == "train" else _distinct(pairs), n)


def _distinct(pairs: Iterator[DemoPair]) -> Iterator[DemoPair]:
    seen: set[str] = set()
    for pair in pairs:
        if pair.src not in seen:
            seen.add(pair.src)
            yield pair


def _stream(seed: str) -> Iterator[tuple[DemoPair, str, list[Combination]]]:
    """Pairs with the split that each belongs to and the combinations that it holds."""
    random, first = Random(seed), start()
    while True:
        pair = derive(first, random)
        src, tgt = _text(_with_an(pair.src)), _text(pair.tgt)
        if any(map(is_reserved, pair.met)):
            where = "held_out_combinations"
        else:
            where = ("valid", "test", *["train"] * 14)[crc32(src.encode()) >> 28]
        yield DemoPair(src, tgt, pair.links, pair.head), where, pair.met


def _with_an(tokens: list[str]) -> list[str]:
    """The English article by the sound that follows."""
    if "a" in tokens:
        for i, token in enumerate(tokens):
            if token == "a" and tokens[i + 1][0] in "aeiou":
                tokens[i] = "an"
    return tokens


def _text(tokens: list[str]) -> str:
    """Words as a line of text: a capital first (also after a question), no space before punctuation."""
    text = " ".join(tokens).replace(" .", ".").replace(" ,", ",").replace(" ?", "?")
    first, mark, second = text.partition("? ")
    if mark:
        second = second[0].upper() + second[1:]
    return first[0].upper() + first[1:] + mark + second


def count_pairs() -> int:
    """How many different pairs the grammar can write, exactly: no two derivations share an English sentence."""
    return start().count


def lexeme_counts() -> tuple[int, int]:
    """Different lexemes of the open classes, English and German: no inflected forms, compounds or number words."""
    words = lexicon()
    english = {("noun", n.en) for n in words.nouns} | {("adjective", a.en) for a in words.adjectives}
    german = {("noun", n.de) for n in words.nouns} | {("adjective", a.de) for a in words.adjectives}
    english |= {("verb", f"{v.en} {v.particle} {v.preposition[0] if v.preposition else ''}") for v in words.verbs}
    german |= {("verb", v.lexeme) for v in words.verbs}
    return len(english), len(german)
