"""Predicates of the built-in corpus: verbs with all that they take, in every mood.

A predicate has two English parts, the auxiliary (empty where there is none) and the rest, and six German ones: finite
verb, pronoun, the pronoun "sie", other objects, the end of a main clause, the end of a subordinate clause.
"heute [holt] [mich] der Mann [] [] [ab]", "dass der Mann [mich] [] [] [abholt]". Where the subject comes after the
finite verb, pronouns stand before it if it is none itself; but "sie" would be taken for the subject there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from transduce.demo.lexicon import PERSONS, Verb, lexicon
from transduce.demo.phrases import (
    PRONOUNS,
    noun_phrase,
    noun_phrase_of,
    object_pronoun,
    predicate_adjective,
    preposition,
)  # fmt: skip
from transduce.demo.rules import Call, Met, Rule, leaf, rule, same


def by_person(forms: str) -> dict[str, str]:
    """Five forms in the order of `PERSONS`."""
    return dict(zip(PERSONS, forms.split(), strict=True))


def all_persons(form: str) -> dict[str, str]:
    """The same form for every person."""
    return dict.fromkeys(PERSONS, form)


HAVE, DO = by_person("have have has have have"), by_person("do do does do do")
BE = by_person("am are is are are"), by_person("bin bist ist sind sind")
WAS = by_person("was were was were were"), by_person("war warst war waren waren")
_GERMAN_PERFECT = {"haben": by_person("habe hast hat haben haben"), "sein": BE[1]}


@dataclass(frozen=True, slots=True)
class Mood:
    """How a verb is used.

    English: auxiliary, word before "to" and the verb, form of the verb. German: auxiliary or else tense, kind of form.
    """

    aux: dict[str, str] | None
    lead: dict[str, str] | None
    form: str
    german: dict[str, str] | None
    tense: str
    kind: str


def _modal(english: str, german: str) -> Mood:
    return Mood(all_persons(english), None, "base", by_person(german), "", "infinitive")


_WANT = by_person("will willst will wollen wollen")
MOODS = {
    "pres": Mood(None, None, "pres", None, "pres", "finite"),
    "past": Mood(None, None, "past", None, "past", "finite"),
    "do pres": Mood(DO, None, "base", None, "pres", "finite"),
    "do past": Mood(all_persons("did"), None, "base", None, "past", "finite"),
    "perfect": Mood(HAVE, None, "participle", None, "", "participle"),
    "will": _modal("will", "werde wirst wird werden werden"),
    "can": _modal("can", "kann kannst kann können können"),
    "must": _modal("must", "muss musst muss müssen müssen"),
    "must not": _modal("must", "darf darfst darf dürfen dürfen"),
    "should": _modal("should", "sollte solltest sollte sollten sollten"),
    "want": Mood(None, by_person("want want wants want want"), "base", _WANT, "", "infinitive"),
    "do want": Mood(DO, all_persons("want"), "base", _WANT, "", "infinitive"),
    "to": Mood(None, None, "base", None, "", "zu"),
}
COPULA = {"pres": BE, "do pres": BE, "past": WAS, "do past": WAS}


@cache
def verb_groups() -> tuple[tuple[Verb, ...], ...]:
    """Verbs that take the same things, together."""
    groups: dict[object, list[Verb]] = {}
    for v in lexicon().verbs:
        groups.setdefault((v.frame, v.local, v.kinds, v.reflexive, v.preposition), []).append(v)
    return tuple(map(tuple, groups.values()))


def groups_of(*frames: str) -> list[int]:
    """The numbers of the verb groups with one of these frames."""
    return [i for i, group in enumerate(verb_groups()) if group[0].frame in frames]


def mark(words: str, name: str) -> str:
    """The words, each with the mark `name`."""
    return " ".join(f"{word}|{name}" for word in words.split())


def verb(group: int, mood: str, person: str, parted: bool = False) -> Iterator[Rule]:
    """Verbs of a group. English parts: auxiliary, the rest; if `parted`, a particle apart from it (turn ... on).

    German parts: finite, end, end of a subordinate clause, reflexive pronoun.
    """
    for v in verb_groups()[group]:
        if mood == "past" and v.en == v.en_past and person != "3s":
            continue  # "they read": taken as the present, so that one English sentence has one German one
        yield inflect(v, mood, person, parted)


def inflect(v: Verb, mood: str, person: str, parted: bool) -> Rule:
    """One verb in a mood and person."""
    m = MOODS[mood]
    own = m.german is not None or m.kind == "participle"  # the German auxiliary has an English counterpart of its own
    aux = mark(m.aux[person], "x" if own else "v") if m.aux else ""
    lead = mark(f"{m.lead[person]} to", "x") if m.lead else ""
    if m.kind == "zu":
        lead = "to|v" if v.prefix else "to|z"
    main, particle = mark(v.english(m.form, person), "v"), mark(v.particle, "v")
    reflexive = mark(PRONOUNS["3sm" if person == "3s" else person][5], "v") if v.reflexive else ""
    if m.kind == "finite":
        finite = v.german(m.tense, person)
        tgt = mark(finite, "v"), mark(v.prefix, "v"), mark(v.prefix + finite, "v")
    elif m.kind == "zu":
        to = f"{v.zu_infinitive}|v" if v.prefix else f"zu|z {v.infinitive}|v"
        tgt = "", to, to
    else:
        finite = mark((m.german or _GERMAN_PERFECT[v.auxiliary])[person], "x")
        form = mark(v.participle if m.kind == "participle" else v.infinitive, "v")
        tgt = finite, form, f"{form} {finite}"
    src = (f"{lead} {main}", particle) if parted else (f"{lead} {main} {particle}",)
    return leaf((aux, *src), (*tgt, reflexive), head=v.lexeme)


def in_city() -> Iterator[Rule]:
    """In Berlin"""
    return (leaf(f"in|p {en}|c", f"in|p {de}|c") for en, de in lexicon().cities)


def location(light: bool) -> Iterator[Rule]:
    """Where: in the kitchen, in Berlin."""
    yield same((preposition, "in", "in", "dat", ("place",), light), weight=0.85)
    yield same((in_city,), weight=0.15)


def direction(light: bool) -> Iterator[Rule]:
    """Where to, where from."""
    yield same((preposition, "into", "in", "acc", ("place",), light), weight=0.35)
    yield same((preposition, "to", "zu", "dat", ("place", "person"), light), weight=0.25)
    yield same((preposition, "through", "durch", "acc", ("place",), light), weight=0.15)
    yield same((preposition, "out of", "aus", "dat", ("place",), light), weight=0.1)
    for en, de in lexicon().cities:
        yield leaf(f"to|p {en}|c", f"nach|p {de}|c", weight=0.1 / len(lexicon().cities))
        yield leaf(f"from|p {en}|c", f"aus|p {de}|c", weight=0.05 / len(lexicon().cities))


ON = (
    ("on", "auf", 0.4),
    ("under", "unter", 0.2),
    ("behind", "hinter", 0.15),
    ("next to", "neben", 0.15),
    ("in front of", "vor", 0.1),
)


def at_furniture(case: str, light: bool) -> Iterator[Rule]:
    """On, under, next to... a piece of furniture: dative for a place, accusative for a direction."""
    for en, de, weight in ON:
        yield same((preposition, en, de, case, ("furniture",), light), weight=weight)


def company() -> Iterator[Rule]:
    """With whom, without whom, or how."""
    yield same((preposition, "with", "mit", "dat", ("person",), False), weight=0.5)
    yield same((preposition, "without", "ohne", "acc", ("person",), False), weight=0.25)
    for en, de in (("alone", "allein"), ("quickly", "schnell")):
        yield leaf(en, de, weight=0.12)


_MAIN = ("0.0", "0.1 1")
_NOT = ("0.0", "not|n 0.1 1")


def predicate(mood: str, person: str, negated: bool, light: bool) -> Iterator[Rule]:
    """What is said of the subject; `light` predicates are short, for sentences of two clauses."""
    for i, group in enumerate(verb_groups()):
        first = group[0]
        if first.frame == "state" and MOODS[mood].kind != "finite":
            continue
        for r in _FRAMES.get(first.frame, _nothing)(first, (verb, i, mood, person), person, negated, light):
            yield replace(r, weight=r.weight * len(group))
    if mood in COPULA:
        yield from _copula(mood, person, negated, light)


def _beginnings(negated: bool, light: bool) -> str:
    """How objects may begin: under "nicht" they are definite."""
    return "definite" if negated else "light" if light else "any"


def _late(late: str = "1", pronoun: str = "", sie: str = "") -> tuple[str, ...]:
    return ("0.0", f"0.3 {pronoun}", sie, late, "0.1", "0.2")


def _bare(v: Verb, head: Call, person: str, negated: bool, light: bool) -> Iterator[Rule]:
    if negated:
        yield rule([head], ("0.0", "not|n 0.1"), _late("nicht|n"), weight=1.2)
        return
    yield rule([head], ("0.0", "0.1"), _late(""), weight=1.0 if light else 0.3)
    yield rule([head, (location, light)], _MAIN, _late(), weight=0.2 if light else 0.4)
    if v.frame == "social" and not light:
        yield rule([head, (company,)], _MAIN, _late(), weight=0.6)


_OBJECT: Met = (("object", 0, 1),)


def _accusative(v: Verb, head: Call, person: str, negated: bool, light: bool) -> Iterator[Rule]:
    thing = (noun_phrase_of, "acc", v.kinds, _beginnings(negated, light))
    src, late = (_NOT, "1 nicht|n") if negated else (_MAIN, "1")
    yield rule([head, thing], src, _late(late), met=_OBJECT)
    if v.local and not light and not negated:
        yield rule([head, thing, (location, True)], ("0.0", "0.1 1 2"), _late("1 2"), weight=0.4, met=_OBJECT)
    if negated:
        nothing = (noun_phrase_of, "acc", v.kinds, "no")
        yield rule([head, nothing], ("0.0", "1.0 0.1 1.1"), _late("1"), weight=0.6, met=_OBJECT)
    if "person" in v.kinds:
        no, late = ("not|n", "nicht|n") if negated else ("", "")
        src = ("0.0", f"{no} 0.1 1 0.2")
        for only, place, weight in (("not sie", ("1", ""), 0.15), ("sie", ("", "1"), 0.1)):
            yield rule([(*head, True), (object_pronoun, "acc", person, only)], src, _late(late, *place), weight=weight)


def _dative(v: Verb, head: Call, person: str, negated: bool, light: bool) -> Iterator[Rule]:
    whom = (noun_phrase_of, "dat", v.kinds, _beginnings(negated, light))
    yield rule([head, whom], _NOT if negated else _MAIN, _late("1 nicht|n" if negated else "1"), met=_OBJECT)
    src, late = (_NOT, "nicht|n") if negated else (_MAIN, "")
    yield rule([head, (object_pronoun, "dat", person)], src, _late(late, "1"), weight=0.4)


def _both(v: Verb, head: Call, person: str, negated: bool, light: bool) -> Iterator[Rule]:
    kinds, whom, pronoun = v.kinds, (noun_phrase_of, "dat", ("person",), "light"), (object_pronoun, "dat", person)
    if negated:
        nothing = (noun_phrase_of, "acc", kinds, "no")
        src = ("0.0", "1.0 0.1 1.1 to 2")
        yield rule([head, nothing, whom], src, _late("2 1"), weight=0.3, met=_OBJECT)
        yield rule([head, nothing, pronoun], src, _late("1", "2"), weight=0.3, met=_OBJECT)
    thing = (noun_phrase_of, "acc", kinds, _beginnings(negated, light))
    no, late = ("not|n", " nicht|n") if negated else ("", "")
    src = ("0.0", f"{no} 0.1 1 to 2")
    yield rule([head, thing, whom], src, _late("2 1" + late), weight=0.5, met=_OBJECT)
    yield rule([head, thing, pronoun], src, _late("1" + late, "2"), weight=0.5, met=_OBJECT)


def _prepositional(v: Verb, head: Call, person: str, negated: bool, light: bool) -> Iterator[Rule]:
    assert v.preposition
    en, de, case = v.preposition
    what = (preposition, en, de, case, v.kinds, light)
    yield rule([head, what], _NOT if negated else _MAIN, _late("nicht|n 1" if negated else "1"), met=_OBJECT)
    if "person" in v.kinds:
        pronoun = (object_pronoun, case, person)
        no, late = ("not|n", "nicht|n") if negated else ("", "")
        yield rule([head, pronoun], ("0.0", f"{no} 0.1 {mark(en, 'p')} 1"), _late(f"{late} {de}|p 1"), weight=0.3)


def _placed(v: Verb, head: Call, person: str, negated: bool, light: bool) -> Iterator[Rule]:
    src, late = (_NOT, "nicht|n 1") if negated else (_MAIN, "1")
    if v.frame == "motion":
        yield rule([head, (direction, light)], src, _late(late))
    elif v.frame == "stay":
        yield rule([head, (location, light)], src, _late(late))
    elif v.frame == "sit":
        yield rule([head, (at_furniture, "dat", light)], src, _late(late))
    elif v.frame == "put" and not negated:
        thing = (noun_phrase, "acc", "sg", "thing", "light" if light else "any")
        yield rule([head, thing, (at_furniture, "acc", True)], ("0.0", "0.1 1 2"), _late("1 2"), met=_OBJECT)


def _nothing(v: Verb, head: Call, person: str, negated: bool, light: bool) -> Iterator[Rule]:
    return iter(())  # verbs that have sentences of their own


_FRAMES = {
    "none": _bare, "social": _bare, "acc": _accusative, "state": _accusative, "dat": _dative, "both": _both,
    "prep": _prepositional, "motion": _placed, "stay": _placed, "sit": _placed, "put": _placed,
}  # fmt: skip


def _copula(mood: str, person: str, negated: bool, light: bool) -> Iterator[Rule]:
    en, de = (forms[person] for forms in COPULA[mood])
    rest, late = ("not|n 0", "nicht|n 0") if negated else ("0", "0")
    tgt = (f"{de}|v", "", "", late, "", f"{de}|v")
    src = (f"{en}|v", rest)
    yield rule([(predicate_adjective, "person" if light else "state")], src, tgt, weight=6.0, head="sein")
    yield rule([(location, True)], src, tgt, weight=1.5, head="sein")
