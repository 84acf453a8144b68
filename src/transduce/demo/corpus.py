"""The built-in corpus: endless English and German sentence pairs from a synchronous grammar.

It needs no file and no network, and covers difficulties of translation: verb-final and verb-second clauses, split
verbs, agreement, gender, case, adjective endings, compounds, numbers, dates, negation, questions, relative clauses, and
pronouns with the gender of their noun.

Every English sentence has exactly one German translation, so exact match is a fair score. If German allows several,
a convention decides: "you" is du, the simple past is the preterite, the present perfect the perfect, time comes before
objects and place after them, subordinate clauses begin with their subject, and articles contract (im, zum).

One derivation writes an English and a German sentence. A phrase of either language may have several parts that the
enclosing rule places separately: the German predicate "schaltet ... ein" is split around its object. Rules are data;
`grammar.txt` describes their notation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from itertools import accumulate, islice
from random import Random
from types import MappingProxyType
from zlib import crc32

from transduce.config.settings import DataSettings, Direction
from transduce.data.pairs import Pair
from transduce.data.reading import Source, Sources

Combination = tuple[str, str, str]
Part = list[str]  # words
Phrase = tuple[list[Part], list[Part], str]  # English parts, German parts, head word
Plan = tuple[tuple[tuple[int, int], ...], ...]  # each part: pairs (child, its part); last child: literal words
Literals = tuple[str, ...]
Table = Mapping[str, float]
Lexical = Callable[..., "Iterator[tuple[float, Rule | Symbol]]"]
_REFERENCE = re.compile(r"([A-Z])(\d?)")


@dataclass(slots=True)
class Derivation:
    """A sentence pair being drawn: the words of both sides, and the combinations of head words that occur in it."""

    random: Random
    met: list[Combination] = field(default_factory=list)
    src: list[str] = field(default_factory=list)
    tgt: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Rule:
    """A rule of the grammar: one way to expand a category. A lexical rule has no children, but its own head word.

    src, tgt: how the parts of each side are assembled from the children's parts and the literal words.
    """

    src: Plan
    tgt: Plan
    literals: Literals
    children: tuple[Symbol, ...] = ()
    head: str = ""
    met: tuple[tuple[int | str, ...], ...] = ()

    def draw(self, derivation: Derivation) -> Phrase:
        """Draw the children at random and assemble their parts to a phrase in both languages."""
        words = [[word] for word in self.literals]
        drawn: list[Phrase] = [*(child.draw(derivation) for child in self.children), (words, words, self.head)]
        src = [[word for child, part in items for word in drawn[child][0][part]] for items in self.src]
        tgt = [[word for child, part in items for word in drawn[child][1][part]] for items in self.tgt]
        for names in self.met:
            kind, first, second = (drawn[x][2] if isinstance(x, int) else x for x in names)
            derivation.met.append((kind, first, second))
        return src, tgt, drawn[0][2]


class Symbol:
    """A category of the grammar with its arguments: a weighted choice between rules, expanded when first needed."""

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
    """A block of rules in the grammar's text: its parameters, header items in order, and rules.

    A rule has a weight, and plans, or None to use the only child unchanged.
    """

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
    """A grammar, read from text. `tables`: weighted entries for loops. `lexical`: functions that yield rules."""

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
        """Return the symbol of a category with arguments (`call`); equal calls return the same object."""
        if call not in self._symbols:
            self._symbols[call] = Symbol(self, call)
        return self._symbols[call]

    def expand(self, call: tuple[str, ...]) -> Iterator[tuple[float, Rule | Symbol]]:
        """Yield the rules of a category that can be completed, each with its weight."""
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
        """Yield the product of weights, and all variables, for all values of the loops that meet the conditions."""
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
    """Parse the templates of both sides; return their plans and the literal words. `names`: names of the children."""
    literals: list[str] = []

    def item(text: str) -> tuple[int, int]:
        if (reference := _REFERENCE.fullmatch(text)) and reference[1] in names:
            return names.index(reference[1]), int(reference[2] or 0)
        literals.append(text)
        return len(names), len(literals) - 1

    plans = [tuple(tuple(map(item, part.split())) for part in side.split("/")) for side in (src, tgt)]
    return plans[0], plans[1], tuple(literals)


def lexical_rule(src: str, tgt: str, *, head: str = "", met: tuple[Combination, ...] = ()) -> Rule:
    """Make a rule without children from templates in the grammar's notation. `met`: its combinations of words."""
    return Rule(*_plans(src, tgt, []), head=head, met=met)


def derive(symbol: Symbol | Rule, random: Random, contractions: Mapping[str, str] = MappingProxyType({})) -> Derivation:
    """Draw a sentence pair from a symbol, which must have one part in each language.

    A German word that begins with "+" contracts with the previous word, as `contractions` says.
    """
    derivation = Derivation(random)
    (derivation.src,), (tgt,), _ = symbol.draw(derivation)
    for word in tgt:
        if word[0] == "+" and derivation.tgt and (short := contractions.get(f"{derivation.tgt[-1]} {word[1:]}")):
            derivation.tgt[-1] = short
        else:
            derivation.tgt.append(word.removeprefix("+"))
    return derivation


SPLITS = ("train", "valid", "test", "held_out_combinations")
HELD_OUT = 500
"""Number of sentence pairs in each held-out split."""

CASES, GENDERS = ("nom", "acc", "dat", "gen"), ("masc", "fem", "neut")
PERSONS = ("1s", "2s", "3s", "1p", "3p")
COMPOUND_SHARE = 0.15
Leaves = Iterator[tuple[float, Rule | Symbol]]
"""The weighted rules of a lexical category.

Genders are masc, fem, neut; cases nom, acc, dat, gen; numbers sg, pl; persons 1s, 2s (du), 3s, 1p, 3p.
"""

# One in this many word combinations of a kind never occurs in train, valid or test.
_RESERVED = {"adjective": 16, "object": 16, "compound": 12, "number": 12, "separable": 8}


@dataclass(frozen=True, slots=True)
class DemoPair:
    """A sentence pair. `structure`: the kind of sentence, such as "passive"."""

    src: str
    tgt: str
    structure: str


@cache
def is_reserved(combination: Combination) -> bool:
    """Whether a combination of two words is excluded from train, valid and test."""
    kind, first, second = combination
    if (kind == "separable" and "+" not in first) or (kind == "number" and not (first.isdigit() and len(first) < 3)):
        return False  # numbers over 99 are too rare: training might lack some of their parts
    return bool(first and second) and crc32("\t".join(combination).encode()) % _RESERVED[kind] == 0


def demo_pairs(split: str, n: int, *, seed: int) -> Iterator[DemoPair]:
    """Generate `n` pairs of a split: train, valid, test or held_out_combinations.

    Equal arguments give equal pairs, and a larger `n` only appends pairs. No pair is in two splits.
    Train, valid and test contain no reserved combination of words; every pair of held_out_combinations contains at
    least one. Only train may contain a pair twice.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: must be one of {', '.join(SPLITS)}")
    pairs = (pair for pair, where, _ in _stream(f"{split} {seed}") if where == split)
    return islice(pairs if split == "train" else _distinct(pairs), n)


def demo_sources(data: DataSettings, *, seed: int) -> Sources[Pair]:
    """Return the sources of the built-in corpus, with `data.demo` pairs to train on."""
    direction = data.src_lang, data.tgt_lang
    splits = ("valid", "test", "held_out_combinations")
    valid, *tests = (_source(split, HELD_OUT, seed, direction) for split in splits)
    return Sources((_source("train", data.demo, seed, direction),), (valid,), tuple(tests))


def _source(split: str, n: int, seed: int, direction: Direction) -> Source[Pair]:
    """Return a source of the first `n` pairs of a split. Its content is not hashed, as settings determine the pairs."""

    def read() -> Iterator[Pair]:
        for number, pair in enumerate(demo_pairs(split, n, seed=seed), 1):
            yield Pair(pair.src, pair.tgt, f"built-in corpus, {split}", number)

    return Source(split, read, ("built-in corpus",) if split == "train" else (), direction=direction)


def _distinct(pairs: Iterator[DemoPair]) -> Iterator[DemoPair]:
    seen: set[str] = set()
    for pair in pairs:
        if pair.src not in seen:
            seen.add(pair.src)
            yield pair


def _stream(seed: str) -> Iterator[tuple[DemoPair, str, list[Combination]]]:
    """Generate pairs, each with its split and its combinations of words."""
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


# The words, from `lexicon.txt`, as lexical categories of the grammar.


def rows(section: str) -> list[list[str]]:
    """Return the rows of a section of `lexicon.txt`, as lists of words, without the section's name."""
    return _sections().get(section, [])


@cache
def _sections() -> dict[str, list[list[str]]]:
    sections: dict[str, list[list[str]]] = {}
    for line in (files("transduce.demo") / "lexicon.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            section, *row = line.split()
            sections.setdefault(section, []).append(row)
    return sections


@cache
def grammar() -> Grammar:
    lexical = (word, noun, adjective, article, verb, preposition, numeral, year)
    text = (files("transduce.demo") / "grammar.txt").read_text(encoding="utf-8")
    return Grammar(text, _tables(), {category.__name__: category for category in lexical})


def _tables() -> Mapping[str, Table]:
    """Make the tables for loops of the grammar: verbs of a frame, noun classes of a verb, genders of a class."""
    tables: dict[str, dict[str, float]] = {}
    sizes: dict[str, float] = {}
    for kinds, _, _, gender, *_ in rows("noun"):
        for kind in kinds.split(","):
            genders = tables.setdefault(f"genders.{kind}", {})
            genders[gender] = genders.get(gender, 0) + 1
            sizes[kind] = sizes.get(kind, 0) + 1
    for frame, *_ in rows("verb"):
        head, _, kinds = frame.partition(":")
        for name in ("prep",) if ">" in head else ("acc", "local") if head == "acc@" else (head,):
            group = tables.setdefault(f"verbs.{name}", {})
            group[frame] = group.get(frame, 0) + 1
        tables[f"preposition.{frame}"] = {head.removeprefix("self>"): 1}
        total = sum(sizes[kind] for kind in kinds.split(",") if kind)
        tables[f"kinds.{frame}"] = {kind: sizes[kind] / total for kind in kinds.split(",") if kind}
    for name, *_, declension in rows("determiner"):
        tables[f"declension.{name}"] = {declension: 1}
    return tables


def ending(table: str, case: str, number: str, gender: str) -> str:
    forms = next((row[2:] for row in rows("ending") if row[:2] == [table, case]), "----")
    return forms[GENDERS.index(gender) if number == "sg" else 3].replace("-", "")


def word(section: str) -> Leaves:
    for en, de in rows(section):
        yield 1.0, lexical_rule(en.replace("_", " "), de.replace("_", " "), head=en)


def noun(case: str, number: str, kind: str, gender: str) -> Leaves:
    """Nouns, alone or as the head of a compound: garden + table = Gartentisch. Mass nouns have no plural."""
    modifiers = [(en, de) for en, de, kinds in rows("modifier") if kind in kinds.split(",")]
    for kinds, en, en_plural, own_gender, *singular, plural, dative_plural in rows("noun"):
        form, de = en, singular[CASES.index(case)]
        if number == "pl":
            form, de = en_plural, dative_plural if case == "dat" else plural
        if kind in kinds.split(",") and own_gender == gender and form != "-":
            yield 1 - COMPOUND_SHARE * bool(modifiers), lexical_rule(form, de, head=en)
            for first, first_de in modifiers:
                rule = lexical_rule(f"{first} {form}", first_de + de.lower(), head=en, met=(("compound", first, en),))
                yield COMPOUND_SHARE / len(modifiers), rule


def adjective(kind: str, declension: str, case: str, number: str, gender: str) -> Leaves:
    """Adjectives in one form. `declension`: the noun phrase's declension or, after "is", "none" or "comparative"."""
    for en, de, stem, kinds, more, more_de in rows("adjective"):
        word_en = more.replace("_", " ") if declension == "comparative" else en
        if kind in kinds.split(",") and word_en != "-":
            form = {"none": de, "comparative": more_de}.get(declension, stem + ending(declension, case, number, gender))
            yield 1.0, lexical_rule(word_en, form, head=en)


def article(determiner: str, case: str, number: str, gender: str, kind: str) -> Leaves:
    """The beginning of a noun phrase: an article, possessive, quantifier, number, or a name in the genitive."""
    if determiner == "number" and number == "pl":
        yield 1.0, grammar().symbol("numeral", "999")
    elif determiner == "name" and kind != "person" and case != "gen":
        for en, de in (*rows("woman"), *rows("man")):
            yield 1.0, lexical_rule(f"{en}'s", f"{de}s")
    mass = all(row[2] == "-" for row in rows("noun") if kind in row[0].split(","))
    for name, *english, stem, table, _ in rows("determiner"):
        en = english[1 if number == "pl" else 2 if mass else 0].replace("_", " ").replace("0", "")
        if name == determiner and en != "-":
            de = stem.replace("_", " ") + ending(table, case, number, gender) if stem != "0" else ""
            yield 1.0, lexical_rule(en, de, head=name)


def verb(group: str, mood: str, person: str) -> Leaves:
    """Verbs of a group of the lexicon, in one mood and person.

    English parts: auxiliary, main verb, particle. German parts: finite verb, end of a main clause, end of a
    subordinate clause, reflexive pronoun.
    """
    i, third = PERSONS.index(person), person == "3s"
    ((aux, before, form, german, kind),) = (row for name, *row in rows("mood") if name == mood)
    aux, before, german = ((x.split("/") * 5)[i] for x in (aux, before, german))
    for frame, base, present, past, done, particle, lexeme, present_de, past_de, done_de, perfect in rows("verb"):
        if frame != group or (mood == "past" and base == past and not third):
            continue  # "they read" is the present, so that every English sentence has one German translation
        prefix, _, infinitive = lexeme.rpartition("+")
        main = {"base": base, "pres": present if third else base, "past": past, "participle": done}[form]
        if kind == "finite":
            finite = (present_de if german == "pres" else past_de).split("/")[i]
            parts = [finite, prefix, prefix + finite]
        elif kind == "zu":
            parts = ["", *[f"{prefix}zu{infinitive}" if prefix else f"zu {infinitive}"] * 2]
        else:
            auxiliary = rows(f"perfect.{perfect}")[0][i] if kind == "participle" else german
            end = done_de if kind == "participle" else prefix + infinitive
            parts = [auxiliary, end, f"{end} {auxiliary}"]
        parts.append(rows("reflexive")[0][i] if frame.startswith("self>") else "")
        src = f"{aux} / {before} {main} / {particle}".replace("-", "").replace("_", " ")
        yield 1.0, lexical_rule(src, " / ".join(parts), head=lexeme)


def preposition(triple: str) -> Leaves:
    """A preposition, given by a `triple` such as English>German>case."""
    en, de, _ = triple.replace("-", "").replace("_", " ").split(">")
    yield 1.0, lexical_rule(en, de)


def numeral(largest: str) -> Leaves:
    """Numbers from two on, mostly small. All take a plural noun, so 101, 201 and so on are left out."""
    below = {int(n): (en, de) for n, en, de in rows("number")}
    for n in range(2, int(largest) + 1):
        hundreds, rest = divmod(n, 100)
        en, de = below.get(rest, ("", ""))
        if hundreds:
            en = f"{below[hundreds][0]} hundred{' and ' if rest else ''}{en}"
            de = f"{below[hundreds][1] if hundreds > 1 else 'ein'}hundert{de}"
        if rest != 1:
            weight = 0.45 / 11 if n <= 12 else 0.45 / 87 if n < 100 else 0.1 / 891
            yield weight, lexical_rule(en, de, head=str(n))


def year() -> Leaves:
    """Years: nineteen eighty-four, neunzehnhundertvierundachtzig."""
    numbers = rows("number")
    for _, century, century_de in numbers[16:19]:
        for _, en, de in numbers[9:]:
            yield 1.0, lexical_rule(f"{century} {en}", f"{century_de}hundert{de}")
