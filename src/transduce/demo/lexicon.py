"""The lexicon of the built-in corpus and the morphology of both languages: all forms from a few principal parts.

The words are data (`lexicon.txt`); this module reads them and inflects them. German conventions: genders m, f, n;
cases nom, acc, dat, gen; numbers sg, pl; persons 1s, 2s (du), 3s, 1p, 3p.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

CASES = ("nom", "acc", "dat", "gen")
GENDERS = ("m", "f", "n")
PERSONS = ("1s", "2s", "3s", "1p", "3p")

# Endings by case; columns m, f, n, pl. The three declensions of adjectives go by what stands before them.
ARTICLES = {
    "der": {"nom": "der die das die", "acc": "den die das die", "dat": "dem der dem den", "gen": "des der des der"},
    "dies": {"nom": "er e es e", "acc": "en e es e", "dat": "em er em en", "gen": "es er es er"},
    "ein": {"nom": "- e - e", "acc": "en e - e", "dat": "em er em en", "gen": "es er es er"},
}
ADJECTIVE_ENDINGS = {
    "weak": {"nom": "e e e en", "acc": "en e e en", "dat": "en en en en", "gen": "en en en en"},
    "mixed": {"nom": "er e es en", "acc": "en e es en", "dat": "en en en en", "gen": "en en en en"},
    "strong": {"nom": "er e es e", "acc": "en e es e", "dat": "em er em en", "gen": "en er en er"},
}
_COLUMN = {"m": 0, "f": 1, "n": 2, "pl": 3}
_INSEPARABLE = re.compile(r"(be|ver|er|zer|ent|emp|ge|über)\w{3,}")


def ending(table: dict[str, str], case: str, column: str) -> str:
    """The ending of `case` in the column of a gender, or of the plural (`pl`)."""
    return table[case].split()[_COLUMN[column]].replace("-", "")


@dataclass(frozen=True, slots=True)
class Noun:
    """A noun of both languages; mass nouns have no plural."""

    kind: str
    en: str
    en_plural: str
    de: str
    gender: str
    de_plural: str
    genitive: str

    def english(self, number: str) -> str:
        """The English form."""
        return self.en if number == "sg" else self.en_plural

    def german(self, case: str, number: str) -> str:
        """The German form."""
        if number == "pl":
            return self.de_plural + ("n" if case == "dat" and self.de_plural[-1] not in "ns" else "")
        if self.genitive == "=":
            return self.de if case == "nom" else self.de_plural
        return self.genitive if case == "gen" else self.de


@dataclass(frozen=True, slots=True)
class Adjective:
    """An adjective, the noun classes that it goes with, and its comparatives (empty where none is used)."""

    en: str
    de: str
    stem: str
    kinds: tuple[str, ...]
    en_comparative: str
    de_comparative: str


@dataclass(frozen=True, slots=True)
class Modifier:
    """The first part of a compound, and the noun classes that it goes with."""

    en: str
    de: str
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb of both languages. `frame` says what it takes; `prefix` is the separable one, or empty.

    `particle` is that of an English phrasal verb whose pronoun stands before it (turn it on); the English forms are
    without it.
    """

    frame: str
    local: bool
    kinds: tuple[str, ...]
    reflexive: bool
    preposition: tuple[str, str, str] | None
    en: str
    en_past: str
    en_participle: str
    particle: str
    de: str
    prefix: str
    first: str
    second: str
    third: str
    preterite: str
    participle: str
    auxiliary: str

    @property
    def lexeme(self) -> str:
        """The German dictionary form; a separable prefix is parted by "+"."""
        return f"{self.prefix}+{self.de}" if self.prefix else self.de

    def english(self, form: str, person: str = "3s") -> str:
        """The English form: base, participle, pres or past (with a person)."""
        if form == "pres":
            return _on_first(self.en, _plural) if person == "3s" else self.en
        return {"base": self.en, "past": self.en_past, "participle": self.en_participle}[form]

    def german(self, tense: str, person: str) -> str:
        """The finite German form without the prefix; `tense` is pres or past."""
        if tense == "pres":
            forms = {"1s": self.first, "2s": self.second, "3s": self.third, "1p": self.de, "3p": self.de}
        else:
            weak, past = self.preterite.endswith("e"), self.preterite
            plural = past + ("n" if weak else "en")
            forms = {"1s": past, "2s": past + "st", "3s": past, "1p": plural, "3p": plural}
        return forms[person]

    @property
    def infinitive(self) -> str:
        """Einschalten"""
        return self.prefix + self.de

    @property
    def zu_infinitive(self) -> str:
        """einzuschalten, zu kaufen"""
        return f"{self.prefix}zu{self.de}" if self.prefix else f"zu {self.de}"


@dataclass(frozen=True, slots=True)
class Lexicon:
    """All words that the grammar draws from, but for the closed classes, which stand in its rules."""

    nouns: tuple[Noun, ...]
    modifiers: tuple[Modifier, ...]
    adjectives: tuple[Adjective, ...]
    verbs: tuple[Verb, ...]
    names: tuple[tuple[str, str, str], ...]
    cities: tuple[tuple[str, str], ...]


def _on_first(text: str, inflect: Callable[[str], str]) -> str:
    """Inflect the first word of a phrasal verb."""
    first, space, rest = text.partition(" ")
    return inflect(first) + space + rest


def _sibilant(word: str) -> bool:
    return word.endswith(("s", "x", "z", "ch", "sh"))


def _plural(word: str) -> str:
    """Regular English plural; also the third person of verbs."""
    if _sibilant(word):
        return word + "es"
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith("o") and word not in ("radio", "piano") else "s")


def _past(word: str) -> str:
    """Regular English past."""
    if word.endswith("e"):
        return word + "d"
    return word[:-1] + "ied" if word.endswith("y") and word[-2] not in "aeiou" else word + "ed"


def _genitive(word: str) -> str:
    """Regular genitive of a strong masculine or neuter: -es after a hiss or in words of one syllable, else -s."""
    syllables = len(re.findall("[aeiouäöüy]+", word.lower()))
    return word + (
        "es" if word.endswith(("s", "ß", "x", "z")) or (syllables == 1 and word[-1] not in "aeiouäöü") else "s"
    )


def _read_noun(row: list[str]) -> Noun:
    kind, en, en_plural, de, gender, de_plural, genitive = row
    if genitive == "-":
        genitive = de if gender == "f" else _genitive(de)
    if de_plural == "-":
        return Noun(kind, en, "", de, gender, "", genitive)
    return Noun(kind, en, _plural(en) if en_plural == "-" else en_plural, de, gender, de_plural, genitive)


def _read_adjective(row: list[str]) -> Adjective:
    en, de, stem, kinds, en_comparative, de_comparative = (cell.replace("_", " ").strip() for cell in row)
    bare = ["" if cell == "-" else cell for cell in (en_comparative, de_comparative)]
    return Adjective(en, de, de if stem == "-" else stem, tuple(kinds.split(",")), *bare)


def _read_frame(text: str) -> tuple[str, bool, tuple[str, ...], bool, tuple[str, str, str] | None]:
    """`self>after>um>acc:person` -> (frame, with a place?, noun classes, reflexive?, (English, German, case))."""
    head, _, kinds = text.partition(":")
    parts = head.split(">")
    reflexive = parts[0] == "self"
    if len(parts) == 1:
        return head.rstrip("@"), head.endswith("@"), tuple(filter(None, kinds.split(","))), False, None
    en, de, case = parts[reflexive:]
    return "prep", False, tuple(kinds.split(",")), reflexive, (en.replace("-", "").replace("_", " "), de, case)


def _read_verb(row: list[str]) -> Verb:
    frame, en, en_past, en_participle, de, persons, preterite, participle, auxiliary = row
    en, _, particle = en.replace("_", " ").partition("+")
    first, space, rest = en.partition(" ")
    past = _past(first) if en_past == "-" else en_past
    en_participle = past if en_participle == "-" else en_participle
    prefix, _, base = de.rpartition("+")
    stem = base[:-1] if base.endswith(("ern", "eln")) else base[:-2]
    e = "e" if stem.endswith(("t", "d", "chn", "ffn")) else ""
    second = stem + e + ("t" if stem.endswith(("s", "ß", "z", "x")) else "st")
    given = [] if persons == "-" else persons.split("/")
    singular = [stem + "e", second, stem + e + "t"]
    singular[3 - len(given) :] = given
    regular = ("" if _INSEPARABLE.match(base) or base.endswith("ieren") else "ge") + stem + e + "t"
    kind, local, kinds, reflexive, preposition = _read_frame(frame)
    return Verb(
        frame=kind,
        local=local,
        kinds=kinds,
        reflexive=reflexive,
        preposition=preposition,
        en=en,
        en_past=past + space + rest,
        en_participle=en_participle + space + rest,
        particle=particle,
        de=base,
        prefix=prefix,
        first=singular[0],
        second=singular[1],
        third=singular[2],
        preterite=stem + e + "te" if preterite == "-" else preterite,
        participle=prefix + (regular if participle == "-" else participle),
        auxiliary=auxiliary,
    )


@cache
def lexicon() -> Lexicon:
    """Read the packaged lexicon, once."""
    rows: dict[str, list[list[str]]] = {}
    for line in (files("transduce.demo") / "lexicon.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            section, *row = line.split()
            rows.setdefault(section, []).append(row)
    return Lexicon(
        nouns=tuple(map(_read_noun, rows["noun"])),
        modifiers=tuple(Modifier(en, de, tuple(kinds.split(","))) for en, de, kinds in rows["modifier"]),
        adjectives=tuple(map(_read_adjective, rows["adjective"])),
        verbs=tuple(map(_read_verb, rows["verb"])),
        names=tuple((gender, en, de) for gender, en, de in rows["name"]),
        cities=tuple((en, de) for _, en, de in rows["city"]),
    )
