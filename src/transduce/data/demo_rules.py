"""Synchronous rules: one derivation writes an English and a German phrase at once, and knows which words belong together.

A phrase of either language may come in several parts (a synchronous multiple context-free grammar): the German predicate
"schaltet ... ein" has its parts at different places of a clause. A category is a function of features that yields `Rule`s;
a child is named by a call, `(category, *features)`. The grammar has no recursion, so its derivations can be counted.

Templates name children by number, and their parts after a dot: "0 1.2". Any other word stands for itself; words with the
same mark ("the|a", "der|a") are translations of each other. In a rule without children, unmarked words are so too.
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
Part = tuple[int, ...]
Drawn = tuple[tuple[Part, ...], tuple[Part, ...], str]
Plan = tuple[tuple[tuple[int, int], ...], ...]
_CHILD = re.compile(r"(\d+)(?:\.(\d))?")
_MAX_PARTS, _MAX_LEAVES = 8, 64
_PARTS = [[tuple((k * _MAX_PARTS + p,) for p in range(n)) for k in range(_MAX_LEAVES)] for n in range(_MAX_PARTS + 1)]


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to write a category; made by `rule` and `leaf`.

    `head` is the child that gives the phrase its lexeme, or the lexeme itself. `combinations` are (kind, child, child or
    constant): pairs of lexemes whose meeting is recorded, because some are held out of training.
    """

    children: tuple[Call, ...]
    src: tuple[str, ...]
    tgt: tuple[str, ...]
    weight: float
    head: int | str
    combinations: tuple[tuple[str, int | str, int | str], ...]


def rule(
    children: Sequence[Call],
    src: str | tuple[str, ...] = "0",
    tgt: str | tuple[str, ...] = "0",
    *,
    weight: float = 1.0,
    head: int | str = 0,
    combinations: tuple[tuple[str, int | str, int | str], ...] = (),
) -> Rule:
    """A rule with templates of its parts in either language; one part may be given as a plain string."""
    src, tgt = (side if isinstance(side, tuple) else (side,) for side in (src, tgt))
    return Rule(tuple(children), src, tgt, weight, head, combinations)


def leaf(
    src: str | tuple[str, ...],
    tgt: str | tuple[str, ...],
    *,
    head: str = "",
    weight: float = 1.0,
    combinations: tuple[Combination, ...] = (),
) -> Rule:
    """A rule without children: words on both sides."""
    return rule((), src, tgt, weight=weight, head=head, combinations=combinations)


def same(call: Call, *, weight: float = 1.0) -> Rule:
    """A rule that hands its one child on as it is, with all its parts."""
    return Rule((call,), (), (), weight, 0, ())


class Derivation:
    """What a derivation has drawn so far: its leaves in the order of drawing, and the combinations met."""

    __slots__ = ("combinations", "leaves", "random")

    def __init__(self, random: Callable[[], float]) -> None:
        self.random = random
        self.leaves: list[Leaf] = []
        self.combinations: list[Combination] = []


class Leaf:
    """Words that are written as they stand: parts in either language and the links between their words."""

    __slots__ = ("combinations", "head", "links", "src", "tgt")
    count = 1

    def __init__(
        self,
        src: Sequence[Sequence[str]],
        tgt: Sequence[Sequence[str]],
        head: str = "",
        combinations: tuple[Combination, ...] = (),
    ) -> None:
        pairs = [[[word.partition("|")[::2] for word in part] for part in side] for side in (src, tgt)]
        self.src, self.tgt = (tuple(tuple(word for word, _ in part) for part in side) for side in pairs)
        # For every target part: (source part, place in it, place in the target part).
        self.links = tuple(
            tuple(
                (p, i, j)
                for j, (_, mark) in enumerate(part)
                for p, src_part in enumerate(pairs[0])
                for i, (_, src_mark) in enumerate(src_part)
                if src_mark == mark
            )
            for part in pairs[1]
        )
        self.head, self.combinations = head, combinations

    def draw(self, derivation: Derivation) -> Drawn:
        """Write the leaf: references to its parts."""
        leaves = derivation.leaves
        k = len(leaves)
        leaves.append(self)
        if self.combinations:
            derivation.combinations.extend(self.combinations)
        return _PARTS[len(self.src)][k], _PARTS[len(self.tgt)][k], self.head


class Node:
    """A compiled rule with children; constant words are leaves among them."""

    __slots__ = ("children", "combinations", "head", "head_child", "src", "tgt")

    def __init__(self, source: Rule) -> None:
        children: list[Symbol | Leaf] = [symbol(call) for call in source.children]
        places: dict[str, tuple[int, list[list[str]], list[list[str]]]] = {}
        unmarked = 0
        plans: list[Plan] = []
        for side, parts in enumerate((source.src, source.tgt)):
            plan = []
            for part in parts:
                row = []
                for item in part.split():
                    if found := _CHILD.fullmatch(item):
                        row.append((int(found[1]), int(found[2] or 0)))
                        continue
                    word, _, mark = item.partition("|")
                    unmarked += not mark
                    place = places.setdefault(mark or f"{unmarked}", (len(children) + len(places), [], []))
                    place[1 + side].append([word])
                    row.append((place[0], len(place[1 + side]) - 1))
                plan.append(tuple(row))
            plans.append(tuple(plan))
        children += [Leaf(src, tgt) for _, src, tgt in places.values()]
        self.children = tuple(children)
        self.src, self.tgt = plans
        self.head = source.head if isinstance(source.head, str) else ""
        self.head_child = -1 if isinstance(source.head, str) else source.head
        self.combinations = source.combinations

    @property
    def count(self) -> int:
        """Derivations of this rule."""
        return prod(child.count for child in self.children)

    def draw(self, derivation: Derivation) -> Drawn:
        """Draw the children and put their parts in place."""
        drawn = [child.draw(derivation) for child in self.children]
        for kind, a, b in self.combinations:
            first = drawn[a][2] if a.__class__ is int else a
            derivation.combinations.append((kind, first, drawn[b][2] if b.__class__ is int else b))  # type: ignore[arg-type,index]
        src, tgt = [], []
        for plan in self.src:
            part: Part = ()
            for child, p in plan:
                part += drawn[child][0][p]
            src.append(part)
        for plan in self.tgt:
            part = ()
            for child, p in plan:
                part += drawn[child][1][p]
            tgt.append(part)
        return src, tgt, drawn[self.head_child][2] if self.head_child >= 0 else self.head  # type: ignore[return-value]


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
    def weights(self) -> list[float]:
        """The share of every option."""
        total = [0.0, *self._cumulative] if self.options else []
        return [b - a for a, b in zip(total, total[1:], strict=False)]

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
        assert rules, f"no rule for {category.__name__}{tuple(features)}"
        self._options = tuple(map(_compile, rules))
        total = sum(r.weight for r in rules)
        self._cumulative = [x / total for x in accumulate(r.weight for r in rules)]
        self._cumulative[-1] = 1.0

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
        return Leaf(src, tgt, str(source.head), source.combinations)  # type: ignore[arg-type]
    if not source.src:
        return symbol(source.children[0])
    return Node(source)


def derive(start: Symbol, random: Random) -> tuple[list[str], list[str], tuple[tuple[int, int], ...], list[Combination], str]:
    """One derivation: source words, target words, the links between them, the combinations met, and the head of the start."""
    derivation = Derivation(random.random)
    (src,), (tgt,), head = start.draw(derivation)
    leaves, places = derivation.leaves, {}
    src_words: list[str] = []
    for code in src:
        places[code] = len(src_words)
        src_words += leaves[code >> 3].src[code & 7]
    tgt_words: list[str] = []
    links = []
    for code in tgt:
        k, start_tgt = code >> 3, len(tgt_words)
        found = leaves[k]
        tgt_words += found.tgt[code & 7]
        first = code & ~7
        for p, i, j in found.links[code & 7]:
            links.append((places[first + p] + i, start_tgt + j))
    links.sort()
    return src_words, tgt_words, tuple(links), derivation.combinations, head
