"""Synchronous rules: a derivation writes an English and a German phrase at once, and knows which words belong together.

A phrase of either language may come in several parts (a synchronous multiple context-free grammar): the German
predicate "schaltet ... ein" has its parts at different places of a clause. A category is a function of features that
yields `Rule`s; a child is named by a call, `(category, *features)`. Without recursion, derivations can be counted.

Templates name children by number, and their parts after a dot: "0 1.2". Any other word stands for itself; words with
the same mark ("the|a", "der|a") are translations of each other. In a rule without children, unmarked words are so too.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod
from random import Random
from typing import Any

Category = Callable[..., Iterable["Rule"]]
Call = tuple[Any, ...]
Combination = tuple[str, str, str]
Parts = Sequence[tuple[int, ...]]
Drawn = tuple[Parts, Parts, str]
Met = tuple[tuple[str, int | str, int | str], ...]
Plan = tuple[tuple[tuple[int, int], ...], ...]
_CHILD = re.compile(r"(\d+)(?:\.(\d))?")
_BITS = 3  # of a reference: the number of the part; above them that of the leaf
_MAX_PARTS, _MAX_LEAVES = 1 << _BITS, 64
_PARTS = [[tuple((k * _MAX_PARTS + p,) for p in range(n)) for k in range(_MAX_LEAVES)] for n in range(_MAX_PARTS + 1)]


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to write a category; made by `rule` and `leaf`.

    `head` is the child that gives the phrase its lexeme, or the lexeme itself. `met` are pairs of lexemes that meet
    here, each (kind, child or lexeme, child or lexeme): recorded, because some are held out of training.
    """

    children: tuple[Call, ...]
    src: tuple[str, ...]
    tgt: tuple[str, ...]
    weight: float
    head: int | str
    met: Met


def rule(
    children: Sequence[Call],
    src: str | tuple[str, ...] = "0",
    tgt: str | tuple[str, ...] = "0",
    *,
    weight: float = 1.0,
    head: int | str = 0,
    met: Met = (),
) -> Rule:
    """A rule with templates of its parts in either language; one part may be given as a plain string."""
    src, tgt = (side if isinstance(side, tuple) else (side,) for side in (src, tgt))
    return Rule(tuple(children), src, tgt, weight, head, met)


def leaf(
    src: str | tuple[str, ...],
    tgt: str | tuple[str, ...],
    *,
    head: str = "",
    weight: float = 1.0,
    met: Met = (),
) -> Rule:
    """A rule without children: words on both sides."""
    return rule((), src, tgt, weight=weight, head=head, met=met)


def same(call: Call, *, weight: float = 1.0) -> Rule:
    """A rule that hands its one child on as it is, with all its parts."""
    return Rule((call,), (), (), weight, 0, ())


class Derivation:
    """What a derivation has drawn so far: its leaves in the order of drawing, and the combinations of lexemes met."""

    __slots__ = ("leaves", "met", "random")

    def __init__(self, random: Callable[[], float]) -> None:
        self.random = random
        self.leaves: list[Leaf] = []
        self.met: list[Combination] = []


class Leaf:
    """Words that are written as they stand: parts in either language and the links between their words."""

    __slots__ = ("head", "links", "met", "src", "tgt")
    count = 1

    def __init__(
        self,
        src: Sequence[Sequence[str]],
        tgt: Sequence[Sequence[str]],
        head: str = "",
        met: tuple[Combination, ...] = (),
    ) -> None:
        marked = [[[word.partition("|")[::2] for word in part] for part in side] for side in (src, tgt)]
        self.src, self.tgt = (tuple(tuple(word for word, _ in part) for part in side) for side in marked)
        # For every target part: (source part, place in it, place in the target part).
        self.links = tuple(
            tuple(
                (p, i, j)
                for j, (_, mark) in enumerate(part)
                for p, src_part in enumerate(marked[0])
                for i, (_, src_mark) in enumerate(src_part)
                if src_mark == mark
            )
            for part in marked[1]
        )
        self.head, self.met = head, met

    def draw(self, derivation: Derivation) -> Drawn:
        """Write the leaf: references to its parts."""
        leaves = derivation.leaves
        k = len(leaves)
        leaves.append(self)
        if self.met:
            derivation.met.extend(self.met)
        return _PARTS[len(self.src)][k], _PARTS[len(self.tgt)][k], self.head


@dataclass
class _Constant:
    """Words of a template with one mark: the number that they have as a child, and one part for each word."""

    child: int
    parts: tuple[list[list[str]], list[list[str]]]


class Node:
    """A compiled rule with children; constant words are leaves among them."""

    __slots__ = ("children", "head", "head_child", "met", "src", "tgt")

    def __init__(self, source: Rule) -> None:
        constants: dict[str, _Constant] = {}
        n_children = len(source.children)
        self.src, self.tgt = (
            tuple(tuple(_read_item(item, side, constants, n_children) for item in part.split()) for part in parts)
            for side, parts in enumerate((source.src, source.tgt))
        )
        self.children: tuple[Symbol | Leaf, ...] = (
            *map(symbol, source.children),
            *(Leaf(*constant.parts) for constant in constants.values()),
        )
        self.head = source.head if isinstance(source.head, str) else ""
        self.head_child = -1 if isinstance(source.head, str) else source.head
        self.met = source.met

    @property
    def count(self) -> int:
        """Derivations of this rule."""
        return prod(child.count for child in self.children)

    def draw(self, derivation: Derivation) -> Drawn:
        """Draw the children and put their parts in place."""
        drawn = [child.draw(derivation) for child in self.children]
        for kind, *pair in self.met:
            a, b = (drawn[x][2] if isinstance(x, int) else x for x in pair)
            derivation.met.append((kind, a, b))
        src, tgt = [], []
        for plan in self.src:
            part: tuple[int, ...] = ()
            for child, p in plan:
                part += drawn[child][0][p]
            src.append(part)
        for plan in self.tgt:
            part = ()
            for child, p in plan:
                part += drawn[child][1][p]
            tgt.append(part)
        return src, tgt, drawn[self.head_child][2] if self.head_child >= 0 else self.head


def _read_item(item: str, side: int, constants: dict[str, _Constant], n_children: int) -> tuple[int, int]:
    """An item of a template as (child, part). A word becomes a part of the constant leaf of its mark."""
    if found := _CHILD.fullmatch(item):
        return int(found[1]), int(found[2] or 0)
    word, _, mark = item.partition("|")
    mark = mark or f"unmarked {side} {len(constants)}"
    constant = constants.setdefault(mark, _Constant(n_children + len(constants), ([], [])))
    constant.parts[side].append([word])
    return constant.child, len(constant.parts[side]) - 1


class Symbol:
    """A category with its features: the choice between its rules, which are read when first needed."""

    __slots__ = ("_count", "_cumulative", "_options", "call")

    def __init__(self, call: Call) -> None:
        self.call = call
        self._options: tuple[Symbol | Leaf | Node, ...] = ()
        self._cumulative: list[float] = []
        self._count = 0

    @property
    def options(self) -> tuple[Symbol | Leaf | Node, ...]:
        """The compiled rules."""
        if not self._options:
            self._read()
        return self._options

    @property
    def count(self) -> int:
        """Derivations of this category, exactly."""
        if not self._count:
            self._count = sum(option.count for option in self.options)
        return self._count

    def draw(self, derivation: Derivation) -> Drawn:
        """Choose a rule by its weight and write it."""
        options = self._options or self.options
        return options[bisect_right(self._cumulative, derivation.random())].draw(derivation)

    def _read(self) -> None:
        category, *features = self.call
        rules = list(category(*features))
        assert rules, f"no rule for {self!r}"
        total = sum(r.weight for r in rules)
        self._cumulative = [x / total for x in accumulate(r.weight for r in rules)]
        self._cumulative[-1] = 1.0
        self._options = tuple(map(_compile, rules))

    def __repr__(self) -> str:
        return f"{self.call[0].__name__}{self.call[1:]}"


@cache
def symbol(call: Call) -> Symbol:
    """The one symbol of a call."""
    return Symbol(call)


def _compile(source: Rule) -> Symbol | Leaf | Node:
    """A rule without children becomes a leaf, one that only hands its child on becomes that child."""
    if not source.children:
        src, tgt = ([part.split() for part in side] for side in (source.src, source.tgt))
        return Leaf(src, tgt, str(source.head), tuple((kind, str(a), str(b)) for kind, a, b in source.met))
    return Node(source) if source.src else symbol(source.children[0])


@dataclass(frozen=True, slots=True)
class Derived:
    """A sentence pair: words, links between them, the head of the start symbol, combinations of lexemes met."""

    src: list[str]
    tgt: list[str]
    links: tuple[tuple[int, int], ...]
    head: str
    met: list[Combination]


def derive(start: Symbol, random: Random) -> Derived:
    """One derivation from a start symbol of one part on either side."""
    derivation = Derivation(random.random)
    (src,), (tgt,), head = start.draw(derivation)
    leaves = derivation.leaves
    places: dict[int, int] = {}
    src_words: list[str] = []
    for code in src:
        places[code] = len(src_words)
        src_words += leaves[code >> _BITS].src[code & _MAX_PARTS - 1]
    tgt_words: list[str] = []
    links = []
    for code in tgt:
        found, part = leaves[code >> _BITS], code & _MAX_PARTS - 1
        before, first = len(tgt_words), code - part
        tgt_words += found.tgt[part]
        for p, i, j in found.links[part]:
            links.append((places[first + p] + i, before + j))
    links.sort()
    return Derived(src_words, tgt_words, tuple(links), head, derivation.met)
