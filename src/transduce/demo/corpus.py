"""The built-in corpus: endless English and German sentence pairs from a synchronous grammar.

It needs no file and no network, and covers difficulties of translation: verb-final and verb-second clauses, split
verbs, agreement, gender, case, adjective endings, compounds, numbers, dates, negation, questions, relative clauses, and
pronouns with the gender of their noun.

Every English sentence has exactly one German translation, so exact match is a fair score. If German allows several,
a convention decides: "you" is du, the simple past is the preterite, the present perfect the perfect, time comes before
objects and place after them, subordinate clauses begin with their subject, and articles contract (im, zum).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import islice
from random import Random
from zlib import crc32

from transduce.config.settings import DataSettings, Direction
from transduce.data.pairs import Pair
from transduce.data.reading import Source, Sources
from transduce.demo.grammar import Combination, Grammar, Rule, Symbol, Table, derive, lexical_rule

SPLITS = ("train", "valid", "test", "held_out_combinations")
HELD_OUT = 500
"""Pairs of each held-out split."""

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
    """A sentence pair. `structure`: the kind of sentence, as "passive"."""

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

    The same arguments give the same pairs, and a longer draw begins with the shorter one. No pair is in two splits.
    Train, valid and test contain no reserved combination of words; every pair of held_out_combinations contains at
    least one. Only train may contain a pair twice.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: must be one of {', '.join(SPLITS)}")
    pairs = (pair for pair, where, _ in _stream(f"{split} {seed}") if where == split)
    return islice(pairs if split == "train" else _distinct(pairs), n)


def demo_sources(data: DataSettings, *, seed: int) -> Sources[Pair]:
    """The built-in corpus, with `data.demo` pairs to train on."""
    direction = data.src_lang, data.tgt_lang
    splits = ("valid", "test", "held_out_combinations")
    valid, *tests = (_source(split, HELD_OUT, seed, direction) for split in splits)
    return Sources((_source("train", data.demo, seed, direction),), (valid,), tuple(tests))


def _source(split: str, n: int, seed: int, direction: Direction) -> Source[Pair]:
    """A source of the first `n` pairs of a split. It needs no content hash: the settings determine the pairs."""

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
    """The rows of a section of the lexicon, without its name."""
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
    """Tables for loops of the grammar: verbs of a frame, noun classes of a verb, genders of a class."""
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
    """Adjectives before a noun; after "is" the declension is "none" or "comparative"."""
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
    """Verbs of a group.

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
    """A preposition given as English>German>case."""
    en, de, _ = triple.replace("-", "").replace("_", " ").split(">")
    yield 1.0, lexical_rule(en, de)


def numeral(largest: str) -> Leaves:
    """Numbers from two on, mostly small, that take a plural noun: none ends in a bare "one"."""
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
