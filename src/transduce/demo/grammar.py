"""A synchronous grammar engine: one derivation writes an English and a German sentence.

A phrase of either language may have several parts that the enclosing rule places separately: the German predicate
"schaltet ... ein" is split around its object. Rules are data; `grammar.txt` describes their notation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from random import Random
from types import MappingProxyType

Combination = tuple[str, str, str]
Part = list[str]  # words
Phrase = tuple[list[Part], list[Part], str]  # English parts, German parts, head word
Plan = tuple[tuple[tuple[int, int], ...], ...]  # parts as (child, part of it); the literal words are the last child
Literals = tuple[str, ...]
Table = Mapping[str, float]
Lexical = Callable[..., "Iterator[tuple[float, Rule | Symbol]]"]
_REFERENCE = re.compile(r"([A-Z])(\d?)")


@dataclass(slots=True)
class Derivation:
    """A sentence pair: the words of both sides, and the combinations of head words met."""

    random: Random
    met: list[Combination] = field(default_factory=list)
    src: list[str] = field(default_factory=list)
    tgt: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Rule:
    """One way to write a category. A lexical rule has no children and gives its own head."""

    src: Plan
    tgt: Plan
    literals: Literals
    children: tuple[Symbol, ...] = ()
    head: str = ""
    met: tuple[tuple[int | str, ...], ...] = ()

    def draw(self, derivation: Derivation) -> Phrase:
        """Draw the children and assemble the parts."""
        words = [[word] for word in self.literals]
        drawn: list[Phrase] = [*(child.draw(derivation) for child in self.children), (words, words, self.head)]
        src = [[word for child, part in items for word in drawn[child][0][part]] for items in self.src]
        tgt = [[word for child, part in items for word in drawn[child][1][part]] for items in self.tgt]
        for names in self.met:
            kind, first, second = (drawn[x][2] if isinstance(x, int) else x for x in names)
            derivation.met.append((kind, first, second))
        return src, tgt, drawn[0][2]


class Symbol:
    """A category with its arguments: a weighted choice between rules, which are expanded when first needed."""

    def __init__(self, grammar: Grammar, call: tuple[str, ...]) -> None:
        self.grammar, self.call = grammar, call

    @cached_property
    def is_possible(self) -> bool:
        """Whether the symbol has any rule; plurals of mass nouns have none."""
        return next(self.grammar.expand(self.call), None) is not None

    @cached_property
    def rules(self) -> list[Rule | Symbol]:
        weighted_rules = list(self.grammar.expand(self.call))
        self.cumulative = list(accumulate(weight for weight, _ in weighted_rules))
        return [rule for _, rule in weighted_rules]

    def choose(self, random: Random) -> Rule | Symbol:
        return random.choices(self.rules, cum_weights=self.cumulative)[0]

    def draw(self, derivation: Derivation) -> Phrase:
        return self.choose(derivation.random).draw(derivation)


@dataclass(slots=True)
class _Block:
    """A block of rules: parameters, header items in order, rules. A rule is a weight and plans (none: passed on)."""

    parameters: list[str]
    steps: list[tuple[str, str, str]] = field(default_factory=list)  # kind of loop or condition, name, table
    children: dict[str, list[str]] = field(default_factory=dict)  # category and arguments
    met: list[list[str]] = field(default_factory=list)
    rules: list[tuple[float, tuple[Plan, Plan, Literals] | None]] = field(default_factory=list)

    def add(self, item: str) -> None:
        name, word, rest = [*item.split(maxsplit=2), "", ""][:3]
        if word == "=":
            self.children[name] = rest.split()
        elif word == "in":
            self.steps.append(("for", name, rest))
        elif name == "met":
            self.met.append(item.split()[1:])
        else:
            self.steps.append((name, word, rest.removeprefix("in ")))


class Grammar:
    """Rules and tables read from text. `lexical` categories are functions that yield weighted rules."""

    def __init__(self, text: str, tables: Mapping[str, Table], lexical: Mapping[str, Lexical]) -> None:
        self.tables, self.lexical = dict(tables), lexical
        self._blocks: dict[str, list[_Block]] = {}
        self._symbols: dict[tuple[str, ...], Symbol] = {}
        block = _Block([])
        for line in text.splitlines():
            if line.startswith("table "):
                _, name, *entries = line.split()
                self.tables[name] = dict(zip(entries[::2], map(float, entries[1::2] or ["1"]), strict=True))
            elif line.startswith(" "):
                weight, _, templates = line.strip().partition(" ")
                src, _, tgt = templates.partition(" => ")
                block.rules.append((float(weight), _plans(src, tgt, list(block.children)) if templates else None))
            elif line and not line.startswith("#"):
                header, _, items = line.partition(":")
                name, *parameters = header.split()
                block = _Block(parameters)
                self._blocks.setdefault(name, []).append(block)
                for item in filter(None, items.split(",")):
                    block.add(item)

    def symbol(self, *call: str) -> Symbol:
        """The symbol of a category with arguments; always the same object."""
        if call not in self._symbols:
            self._symbols[call] = Symbol(self, call)
        return self._symbols[call]

    def expand(self, call: tuple[str, ...]) -> Iterator[tuple[float, Rule | Symbol]]:
        """The weighted rules of a category that can be completed."""
        name, *arguments = call
        if name in self.lexical:
            yield from self.lexical[name](*arguments)
        for block in self._blocks.get(name, ()):
            given = dict(zip(block.parameters, arguments, strict=True))
            if all(len(parameter) == 1 or parameter == value for parameter, value in given.items()):
                for weight, values in self._loop(block.steps, given):
                    yield from self._complete(block, weight, values)

    def _complete(self, block: _Block, weight: float, values: dict[str, str]) -> Iterator[tuple[float, Rule | Symbol]]:
        names = list(block.children)
        calls = block.children.values()
        children = tuple(self.symbol(name, *(self._scalar(x, values) for x in rest)) for name, *rest in calls)
        if all(child.is_possible for child in children):
            met = tuple(
                (kind, *(names.index(x) if x in names else self._scalar(x, values) for x in pair))
                for kind, *pair in block.met
            )
            for share, plans in block.rules:
                yield weight * share, Rule(*plans, children, met=met) if plans else children[0]

    def _loop(
        self, steps: list[tuple[str, str, str]], values: dict[str, str]
    ) -> Iterator[tuple[float, dict[str, str]]]:
        """All values of the loop variables that satisfy the conditions, with the product of their weights."""
        if not steps:
            yield 1.0, values
            return
        (kind, name, table), *rest = steps
        entries = self._table(self._value(table, values))
        if kind == "for":
            for value, weight in entries.items():
                for more, extended in self._loop(rest, {**values, name: value}):
                    yield weight * more, extended
        elif (values.get(name, name) in entries) == (kind == "if"):
            yield from self._loop(rest, values)

    def _value(self, text: str, values: dict[str, str]) -> str:
        """Replace variables in a dotted name; `x.1` is field 1 of a value whose fields are separated by ">"."""
        parts: list[str] = []
        for name in text.split("."):
            if name.isdigit() and parts:
                parts[-1] = parts[-1].split(">")[int(name)]
            else:
                parts.append(values.get(name, name))
        return ".".join(parts)

    def _table(self, name: str) -> Table:
        while name not in self.tables:
            name, dot, _ = name.rpartition(".")
            if not dot:
                return {}
        return self.tables[name]

    def _scalar(self, text: str, values: dict[str, str]) -> str:
        """Resolve an argument: the single entry of the table with this dotted name, else the name itself."""
        value = self._value(text, values)
        return next(iter(self._table(value)), value) if "." in text else value


def _plans(src: str, tgt: str, names: list[str]) -> tuple[Plan, Plan, Literals]:
    """Parse templates into plans and their literal words."""
    literals: list[str] = []

    def item(text: str) -> tuple[int, int]:
        if (reference := _REFERENCE.fullmatch(text)) and reference[1] in names:
            return names.index(reference[1]), int(reference[2] or 0)
        literals.append(text)
        return len(names), len(literals) - 1

    plans = [tuple(tuple(map(item, part.split())) for part in side.split("/")) for side in (src, tgt)]
    return plans[0], plans[1], tuple(literals)


def lexical_rule(src: str, tgt: str, *, head: str = "", met: tuple[Combination, ...] = ()) -> Rule:
    """A rule without children, from templates in the notation of the grammar."""
    return Rule(*_plans(src, tgt, []), head=head, met=met)


def derive(symbol: Symbol | Rule, random: Random, contractions: Mapping[str, str] = MappingProxyType({})) -> Derivation:
    """Draw a derivation of a symbol with one part.

    A German word that begins with "+" contracts with the previous word.
    """
    derivation = Derivation(random)
    (derivation.src,), (tgt,), _ = symbol.draw(derivation)
    for word in tgt:
        if word[0] == "+" and derivation.tgt and (short := contractions.get(f"{derivation.tgt[-1]} {word[1:]}")):
            derivation.tgt[-1] = short
        else:
            derivation.tgt.append(word.removeprefix("+"))
    return derivation
