"""Noun phrases of the built-in corpus: articles, adjectives, compounds, genitives, pronouns, prepositions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from transduce.demo.lexicon import ADJECTIVE_ENDINGS, ARTICLES, GENDERS, Noun, ending, lexicon
from transduce.demo.numbers import english_number, german_number
from transduce.demo.rules import Met, Rule, leaf, rule, same

GOODS = ("text", "device", "opening", "vehicle", "clothing", "thing", "furniture")
MASS = ("meal", "drink", "cause")
COMPOUND_SHARE = 0.15
ADJECTIVE_SHARE = {True: 0.25, False: 0.5}  # in light noun phrases, and in others

# English before singular and plural, German stem, its article endings, declension of adjectives after it.
DETERMINERS = {
    "the": ("the", "the", "", "der", "weak"),
    "this": ("this", "these", "dies", "dies", "weak"),
    "every": ("every", "", "jed", "dies", "weak"),
    "many": ("", "many", "viel", "dies", "strong"),
    "all": ("", "all", "all", "dies", "weak"),
    "which": ("which", "which", "welch", "dies", "weak"),
    "a": ("a", "", "ein", "ein", "mixed"),
    "my": ("my", "my", "mein", "ein", "mixed"),
    "your": ("your", "your", "dein", "ein", "mixed"),
    "his": ("his", "his", "sein", "ein", "mixed"),
    "her": ("her", "her", "ihr", "ein", "mixed"),
    "our": ("our", "our", "unser", "ein", "mixed"),
    "their": ("their", "their", "ihr", "ein", "mixed"),
}
_SOME = {"every": 0.02, "many": 0.04, "all": 0.03}
_OWN = {"my": 0.06, "your": 0.03, "his": 0.04, "her": 0.04, "our": 0.04, "their": 0.04}
# What a noun phrase may begin with, by its place in the sentence; "bare" and "number" are for plurals and mass nouns.
BEGINNINGS: dict[str, dict[str, float]] = {
    "any": {"the": 0.3, "a": 0.3, "this": 0.07, "bare": 0.14, "number": 0.14, "name": 0.04, **_SOME, **_OWN},
    "subject": {"the": 0.4, "a": 0.25, "this": 0.07, "name": 0.04, **_SOME, **_OWN},
    "definite": {"the": 0.5, "this": 0.1, "name": 0.04, **_OWN},
    "not the": {"a": 0.3, "this": 0.1, **_OWN},
    "mass": {"bare": 0.5, "this": 0.1, **_OWN},
    "light": {"the": 0.6, "a": 0.2, "my": 0.1, "our": 0.1},
    "the": {"the": 1.0},
    "which": {"which": 1.0},
    "how many": {"how many": 1.0},
    "new": {"a": 1.0, "many": 0.3, "number": 0.5, "bare": 0.4},
    "no": {"no": 1.0},
}
PRONOUNS = {  # English subject and object; German nominative, accusative, dative, reflexive
    "1s": ("I", "me", "ich", "mich", "mir", "mich"),
    "2s": ("you", "you", "du", "dich", "dir", "dich"),
    "3sm": ("he", "him", "er", "ihn", "ihm", "sich"),
    "3sf": ("she", "her", "sie", "sie", "ihr", "sich"),
    "1p": ("we", "us", "wir", "uns", "uns", "uns"),
    "3p": ("they", "them", "sie", "sie", "ihnen", "sich"),
}
IT = {"m": {"nom": "er", "acc": "ihn"}, "f": {"nom": "sie", "acc": "sie"}, "n": {"nom": "es", "acc": "es"}}
CONTRACTIONS = {
    "in dem": "im",
    "in das": "ins",
    "an dem": "am",
    "von dem": "vom",
    "zu dem": "zum",
    "zu der": "zur",
    "bei dem": "beim",
}


@cache
def nouns_of(kind: str, gender: str) -> tuple[Noun, ...]:
    """The nouns of a class and gender."""
    return tuple(n for n in lexicon().nouns if n.kind == kind and n.gender == gender)


def noun(case: str, number: str, kind: str, gender: str) -> Iterator[Rule]:
    """Nouns, plain or as heads of a compound (garden + table -> Gartentisch)."""
    nouns = nouns_of(kind, gender)
    modifiers = [m for m in lexicon().modifiers if kind in m.kinds]
    for n in nouns:
        en, de = n.english(number), n.german(case, number)
        yield leaf(en, de, head=n.en, weight=1 - COMPOUND_SHARE if modifiers else 1.0)
        for m in modifiers:
            share, met = COMPOUND_SHARE / len(modifiers), (("compound", m.en, n.en),)
            yield leaf(f"{m.en} {en}", m.de + de.lower(), head=n.en, weight=share, met=met)


def adjective(kind: str, ending: str) -> Iterator[Rule]:
    """Adjectives before a noun."""
    for a in lexicon().adjectives:
        if kind in a.kinds:
            yield leaf(a.en, a.stem + ending, head=a.en)


# Adjectives that rule each other out.
CONTRARY = (
    {"old", "young", "new", "modern"},
    {"big", "small"},
    {"beautiful", "ugly"},
    {"expensive", "cheap"},
    {"red", "blue", "green", "white", "black", "brown"},
    {"clean", "dirty"},
    {"warm", "cold", "hot"},
    {"long", "short"},
    {"boring", "exciting", "interesting", "funny"},
    {"difficult", "simple"},
)


def predicate_adjective(kind: str) -> Iterator[Rule]:
    """Adjectives after "is": without an ending."""
    for a in lexicon().adjectives:
        if kind in a.kinds:
            yield leaf(a.en, a.de, head=a.en)


def one_adjective(en: str) -> Iterator[Rule]:
    """One adjective after "is"."""
    return (leaf(a.en, a.de, head=a.en) for a in lexicon().adjectives if a.en == en)


def other_adjective(kind: str, en: str) -> Iterator[Rule]:
    """Adjectives after "is" that can be true beside another one."""
    contrary = {en}.union(*(group for group in CONTRARY if en in group))
    return (leaf(a.en, a.de, head=a.en) for a in lexicon().adjectives if kind in a.kinds and a.en not in contrary)


def comparative(kind: str) -> Iterator[Rule]:
    """older, more expensive."""
    for a in lexicon().adjectives:
        if kind in a.kinds and a.en_comparative:
            yield leaf(a.en_comparative, a.de_comparative, head=a.en)


def noun_with_adjective(case: str, number: str, kind: str, gender: str, declension: str, light: bool) -> Iterator[Rule]:
    """A noun, perhaps after an adjective that agrees with it."""
    after = ending(ADJECTIVE_ENDINGS[declension], case, gender if number == "sg" else "pl")
    head, share = (noun, case, number, kind, gender), ADJECTIVE_SHARE[light]
    yield same(head, weight=1 - share)
    met: Met = (("adjective", 0, 1),)
    yield rule([(adjective, kind, after), head], "0 1", "0 1", weight=share, head=1, met=met)


def numeral() -> Iterator[Rule]:
    """Numbers before a plural: mostly small ones. None ends in a bare "one"."""
    for n in range(2, 1000):
        if n % 100 != 1:
            weight = 0.45 / 11 if n <= 12 else 0.45 / 87 if n < 100 else 0.1 / 891
            yield leaf(english_number(n), german_number(n), head=str(n), weight=weight)


def noun_phrase(case: str, number: str, kind: str, beginnings: str, only: str = "") -> Iterator[Rule]:
    """A noun phrase, of one gender if `only` says so.

    That of "no" has two English parts: "not ... a key", keinen Schlüssel.
    """
    for gender in only or GENDERS:
        share = float(len(nouns_of(kind, gender)))
        if not share:
            continue
        column = gender if number == "sg" else "pl"
        for name, weight in BEGINNINGS[beginnings].items():
            light = beginnings == "light"
            for made in _begin(name, case, number, kind, gender, column, light):
                yield replace(made, weight=made.weight * weight * share)
        if beginnings in ("any", "subject", "definite") and number == "sg" and kind in (*GOODS, "idea"):
            children = [(noun, case, number, kind, gender), (owner, kind)]
            article = ending(ARTICLES["der"], case, column)
            yield rule(children, "the|a 0 of 1", f"{article}|a 0 1", weight=0.07 * share)


def _begin(name: str, case: str, number: str, kind: str, gender: str, column: str, light: bool) -> Iterator[Rule]:
    """Noun phrases of one gender that begin with one determiner."""

    def rest(declension: str) -> tuple[object, ...]:
        return (noun_with_adjective, case, number, kind, gender, declension, light)

    countable = kind not in MASS
    if name == "no":
        article = "kein" + ending(ARTICLES["ein"], case, column)
        a = "a|k 0" if number == "sg" and countable else "0"
        yield rule([rest("mixed")], ("not|k", a), f"{article}|k 0")
    elif name == "how many":
        many = "viel" + ending(ARTICLES["dies"], case, column)
        yield rule([rest("strong")], "how|a many|b 0", f"wie|a {many}|b 0")
    elif name == "bare":
        if number == "pl" or not countable:
            yield same(rest("strong"))
    elif name == "number":
        if number == "pl":
            yield rule([(numeral,), rest("strong")], "0 1", "0 1", head=1, met=(("number", 0, 1),))
    elif name == "name":
        if kind != "person" and case != "gen":
            for _, en, de in lexicon().names:
                yield rule([rest("strong")], f"{en}'s|a 0", f"{de}s|a 0", weight=1 / len(lexicon().names))
    else:
        singular, plural, stem, articles, declension = DETERMINERS[name]
        en = singular if number == "sg" else plural
        if en and (countable or name not in ("a", "every")):
            yield rule([rest(declension)], f"{en}|a 0", f"{stem}{ending(ARTICLES[articles], case, column)}|a 0")


def owner(kind: str) -> Iterator[Rule]:
    """Whose it is, in the genitive."""
    yield same((noun_phrase, "gen", "sg", "person", "light"))
    if kind in ("opening", "furniture"):
        yield same((noun_phrase, "gen", "sg", "place", "light"))


def noun_phrase_of(case: str, kinds: tuple[str, ...], beginnings: str) -> Iterator[Rule]:
    """A noun phrase of one of several classes, singular or plural."""
    for kind in kinds:
        share = float(sum(len(nouns_of(kind, gender)) for gender in GENDERS))
        plural = 0.0 if kind in MASS or beginnings == "light" else 0.32
        yield same((noun_phrase, case, "sg", kind, beginnings), weight=share * (1 - plural))
        if plural:
            yield same((noun_phrase, case, "pl", kind, beginnings), weight=share * plural)


def preposition(en: str, de: str, case: str, kinds: tuple[str, ...], light: bool) -> Iterator[Rule]:
    """A preposition and its noun phrase, contracted with the article where German does so (in dem -> im)."""
    sizes = {kind: sum(len(nouns_of(kind, gender)) for gender in GENDERS) for kind in kinds}
    start = " ".join(f"{word}|p" for word in en.split())
    for kind in kinds:
        for gender in GENDERS:
            if nouns_of(kind, gender):
                both = f"{de} {ending(ARTICLES['der'], case, gender)}"
                short = CONTRACTIONS.get(both)
                rest = (noun_with_adjective, case, "sg", kind, gender, "weak", light)
                whole = f"{start} the|p 0", f"{short}|p 0"
                parts = f"{start} the|a 0", f"{de}|p {both.split()[1]}|a 0"
                yield rule([rest], *(whole if short else parts), weight=0.6 * len(nouns_of(kind, gender)))
        if light:
            continue
        others = "mass" if kind in MASS else "not the"
        yield rule([(noun_phrase, case, "sg", kind, others)], f"{start} 0", f"{de}|p 0", weight=0.25 * sizes[kind])
        if kind not in MASS:
            several = (noun_phrase, case, "pl", kind, "definite")
            yield rule([several], f"{start} 0", f"{de}|p 0", weight=0.15 * sizes[kind])


def object_pronoun(case: str, person: str, only: str = "") -> Iterator[Rule]:
    """Pronouns of persons as objects of a subject of the given person: never the subject's own.

    `only`: "sie", which before the subject would be taken for it, or "not sie".
    """
    for name, (_, en, _, acc, dat, _) in PRONOUNS.items():
        de = {"acc": acc, "dat": dat}[case]
        wanted = not only or (de == "sie") == (only == "sie")
        if wanted and (name[0] != person[0] or name[0] == "3"):
            yield leaf(en, de, head="pronoun")


def subject_pronoun(person: str) -> Iterator[Rule]:
    """Pronouns of persons as subjects."""
    for name, forms in PRONOUNS.items():
        if name.startswith(person):
            yield leaf(forms[0], forms[2], head="pronoun")


def person_name() -> Iterator[Rule]:
    """Names."""
    for _, en, de in lexicon().names:
        yield leaf(en, de, head=en)


def two_names() -> Iterator[Rule]:
    """Anna and Peter."""
    names = lexicon().names
    for _, en, de in names:
        for _, other_en, other_de in names:
            if en != other_en:
                yield leaf(f"{en}|a and|b {other_en}|c", f"{de}|a und|b {other_de}|c", head="names")


def nominal_subject(person: str, beginnings: str) -> Iterator[Rule]:
    """Who does it: a name, or persons, in the nominative."""
    number = "sg" if person == "3s" else "pl"
    yield same((person_name,) if number == "sg" else (two_names,), weight=0.2)
    yield same((noun_phrase, "nom", number, "person", beginnings), weight=0.8)


def _pronoun_share(person: str, beginnings: str) -> float:
    return 1.0 if person not in ("3s", "3p") else 0.45 if beginnings == "light" else 0.25


def subject(person: str, beginnings: str) -> Iterator[Rule]:
    """Who does it: a pronoun, a name, or persons."""
    share = _pronoun_share(person, beginnings)
    yield same((subject_pronoun, person), weight=share)
    if share < 1:
        yield same((nominal_subject, person, beginnings), weight=1 - share)


def split_subject(person: str, beginnings: str) -> Iterator[Rule]:
    """The same with two German parts: a pronoun, or else something longer. Other pronouns go between their places."""
    share = _pronoun_share(person, beginnings)
    yield rule([(subject_pronoun, person)], "0", ("0", ""), weight=share)
    if share < 1:
        yield rule([(nominal_subject, person, beginnings)], "0", ("", "0"), weight=1 - share)
