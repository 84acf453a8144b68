"""Sentences of one clause of the built-in corpus: statements, questions, negation, prices, the passive."""

from __future__ import annotations

from collections.abc import Iterator

from transduce.demo.adjuncts import adjunct, clock, often, small_numeral, time_at_any_tense
from transduce.demo.lexicon import GENDERS, PERSONS
from transduce.demo.phrases import (
    GOODS,
    comparative,
    noun_phrase,
    noun_phrase_of,
    nouns_of,
    numeral,
    predicate_adjective,
    preposition,
    split_subject,
    subject,
)  # fmt: skip
from transduce.demo.predicates import (
    MOODS,
    at_furniture,
    groups_of,
    in_city,
    location,
    mark,
    predicate,
    verb,
    verb_groups,
)
from transduce.demo.rules import Call, Met, Rule, leaf, rule, same

PERSON_WEIGHTS = dict(zip(PERSONS, (0.12, 0.08, 0.48, 0.08, 0.24), strict=True))
STATED = {
    "pres": 0.26,
    "past": 0.22,
    "perfect": 0.2,
    "will": 0.11,
    "can": 0.05,
    "must": 0.05,
    "should": 0.04,
    "want": 0.07,
}
DENIED = {
    "do pres": 0.38,
    "do past": 0.2,
    "perfect": 0.14,
    "will": 0.08,
    "must not": 0.07,
    "should": 0.05,
    "do want": 0.08,
}
ASKED = {"do pres": 0.33, "do past": 0.22, "perfect": 0.18, "will": 0.1, "can": 0.08, "do want": 0.09}
TENSES = {"pres": "present", "do pres": "present", "past": "past", "do past": "past", "perfect": "perfect"}
THINGS = (*GOODS, "food", "animal", "place", "event", "idea")


def spread(moods: dict[str, float]) -> Iterator[tuple[str, str, float]]:
    """Every mood with every person, and the weight of the two together."""
    for mood, weight in moods.items():
        for person, share in PERSON_WEIGHTS.items():
            if not (person == "2s" and MOODS[mood].tense == "past"):  # "du fandest" is rarely said
                yield mood, person, weight * share


def tense_of(mood: str) -> str:
    """Which adjuncts of time a mood goes with."""
    return TENSES.get(mood, "future")


def separable(mood: str, child: int, order: str = "split") -> Met:
    """The form in which a separable verb is met: split, joined, participle, infinitive, zu."""
    kind = MOODS[mood].kind
    return (("separable", child, order if kind == "finite" else kind),)


def statement() -> Iterator[Rule]:
    """Plain statements; the adjunct last, or first with the verb still second in German."""
    for mood, person, weight in spread(STATED):
        children: list[Call] = [(subject, person, "subject"), (predicate, mood, person, False, False)]
        when: Call = (adjunct, tense_of(mood))
        met = separable(mood, 1)
        yield rule(
            children, "0 1.0 1.1 .|z", "0 1.0 1.1 1.2 1.3 1.4 .|z", weight=0.2 * weight, head="statement", met=met
        )
        children.append(when)
        yield rule(
            children, "0 1.0 1.1 2 .|z", "0 1.0 1.1 1.2 2 1.3 1.4 .|z", weight=0.35 * weight, head="statement", met=met
        )
        children[0], children[2] = (
            (split_subject, person, "subject"),
            (adjunct, tense_of(mood).replace("past", "first past")),
        )
        tgt = "2 1.0 0.0 1.1 0.1 1.2 1.3 1.4 .|z"
        yield rule(children, "2 0 1.0 1.1 .|z", tgt, weight=0.45 * weight, head="fronted", met=met)


def frequency() -> Iterator[Rule]:
    """always, already: before the verb in English, after the pronouns in German."""
    for mood, person, weight in spread({"pres": 0.5, "past": 0.2, "perfect": 0.3}):
        children = [(subject, person, "subject"), (predicate, mood, person, False, False), (often, mood == "perfect")]
        src, tgt = "0 1.0 2 1.1 .|z", "0 1.0 1.1 1.2 2 1.3 1.4 .|z"
        yield rule(children, src, tgt, weight=weight, head="frequency", met=separable(mood, 1))


def negation() -> Iterator[Rule]:
    """Nicht and kein."""
    for mood, person, weight in spread(DENIED):
        children: list[Call] = [(subject, person, "definite"), (predicate, mood, person, True, False)]
        src, tgt, met = "0 1.0 1.1", "0 1.0 1.1 1.2 {} 1.3 1.4 .|z", separable(mood, 1)
        yield rule(children, f"{src} .|z", tgt.format(""), weight=0.7 * weight, head="negation", met=met)
        children.append((adjunct, tense_of(mood).replace("present", "not present")))
        yield rule(children, f"{src} 2 .|z", tgt.format("2"), weight=0.3 * weight, head="negation", met=met)


def question() -> Iterator[Rule]:
    """Yes or no; why, when, how often. Yes or no begins with the verb: few persons of the simple tenses."""
    for mood, person, weight in spread(ASKED):
        children: list[Call] = [(split_subject, person, "subject"), (predicate, mood, person, False, False)]
        src, tgt, met = "1.0 0 1.1", "1.0 0.0 1.1 0.1 1.2 {} 1.3 1.4 ?|z", separable(mood, 1)
        if first := MOODS[mood].kind != "finite" or (mood, person) in (("do pres", "2s"), ("do pres", "3s")):
            yield rule(children, f"{src} ?|z", tgt.format(""), weight=0.4 * weight, head="question", met=met)
        for en, de in (("why", "warum"), ("when", "wann"), ("how|a often|b", "wie|a oft|b")):
            en, de = (side if "|" in side else mark(side, "w") for side in (en, de))
            yield rule(
                children, f"{en} {src} ?|z", f"{de} {tgt.format('')}", weight=0.12 * weight, head="wh-question", met=met
            )
        if first:
            children.append((adjunct, tense_of(mood)))
            yield rule(children, f"{src} 2 ?|z", tgt.format("2"), weight=0.24 * weight, head="question", met=met)


def who() -> Iterator[Rule]:
    """Who opens the door?"""
    for mood, weight in {"pres": 0.4, "past": 0.25, "perfect": 0.2, "can": 0.15}.items():
        children = [(predicate, mood, "3s", False, False)]
        src, tgt = "who|w 0.0 0.1 ?|z", "wer|w 0.0 0.1 0.2 0.3 0.4 ?|z"
        yield rule(children, src, tgt, weight=weight, head="wh-question", met=separable(mood, 0))


def questioned(case: str, kinds: tuple[str, ...]) -> Iterator[Rule]:
    """What is asked for: whom, what, which book, how many books."""
    whom = {"acc": "wen", "dat": "wem"}[case]
    things = tuple(kind for kind in kinds if kind != "person")
    if "person" in kinds:
        yield leaf("whom", whom, weight=0.3)
    if things and case == "acc":
        yield leaf("what", "was", weight=0.3)
    yield same((noun_phrase_of, case, kinds, "which"), weight=0.5)
    if "drink" not in kinds and "meal" not in kinds:
        for kind in kinds:
            yield same((noun_phrase, case, "pl", kind, "how many"), weight=0.2 / len(kinds))


def object_question() -> Iterator[Rule]:
    """Whom does he help? Which book has she read?"""
    for i in groups_of("acc", "dat"):
        group = verb_groups()[i]
        for mood, person, weight in spread(ASKED):
            children = [
                (questioned, group[0].frame, group[0].kinds),
                (subject, person, "light"),
                (verb, i, mood, person),
            ]
            met = (("object", 2, 0), *separable(mood, 2))
            weight *= len(group)
            yield rule(children, "0 2.0 1 2.1 ?|z", "0 2.0 1 2.1 ?|z", weight=weight, head="object question", met=met)


def where() -> Iterator[Rule]:
    """Where does she work?"""
    for i in groups_of("social", "stay"):
        for mood, person, weight in spread(ASKED):
            children = [(subject, person, "subject"), (verb, i, mood, person)]
            src, tgt, met = "where|w 1.0 0 1.1 ?|z", "wo|w 1.0 0 1.1 ?|z", separable(mood, 1)
            yield rule(children, src, tgt, weight=weight * len(verb_groups()[i]), head="wh-question", met=met)


def nominative(kind: str, number: str, beginnings: str = "subject") -> Call:
    """A noun phrase as subject."""
    return (noun_phrase, "nom", number, kind, beginnings)


def size(kind: str) -> float:
    """How many nouns a class has."""
    return float(sum(len(nouns_of(kind, gender)) for gender in GENDERS))


def numbers(kind: str) -> Iterator[tuple[str, str, float]]:
    """Number, person and weight of a subject of a class: singular twice as often."""
    yield "sg", "3s", size(kind) * 0.67
    yield "pl", "3p", size(kind) * 0.33


IS = {"3s": ("is", "ist", "was", "war"), "3p": ("are", "sind", "were", "waren")}


def property_of() -> Iterator[Rule]:
    """Things are old, older than others, or not."""
    for kind in (*THINGS, "person"):
        for number, person, weight in numbers(kind):
            thing, adj, more = nominative(kind, number), (predicate_adjective, kind), (comparative, kind)
            for past in (0, 1):
                en, de = IS[person][2 * past : 2 * past + 2]
                start, start_de, w = f"0 {en}|b", f"0 {de}|b", weight * (0.7, 0.3)[past]
                if kind != "person":
                    met = (("adjective", 1, 0),)
                    yield rule(
                        [thing, adj], f"{start} 1 .|z", f"{start_de} 1 .|z", weight=0.25 * w, head="property", met=met
                    )
                    src, tgt = f"{start} not|n 1 .|z", f"{start_de} nicht|n 1 .|z"
                    certain = nominative(kind, number, "definite")
                    yield rule([certain, adj], src, tgt, weight=0.15 * w, head="property", met=met)
                    src, tgt = f"{en}|b 0 1 ?|z", f"{de}|b 0 1 ?|z"
                    yield rule([thing, adj], src, tgt, weight=0.2 * w, head="property", met=met)
                other = nominative(kind, "sg", "light")
                mild = nominative(kind, number, "definite")
                src, tgt = f"{start} 1 than|t 2 .|z", f"{start_de} 1 als|t 2 .|z"
                yield rule([mild, more, other], src, tgt, weight=0.25 * w, head="comparison")
                src, tgt = f"{start} as|a 1 as|c 2 .|z", f"{start_de} so|a 1 wie|c 2 .|z"
                yield rule([mild, adj, other], src, tgt, weight=0.15 * w, head="comparison")


def quantity() -> Iterator[Rule]:
    """Prices, ages, and what time it is."""
    for kind in ("device", "vehicle", "clothing", "thing", "furniture"):
        for number, person, weight in numbers(kind):
            src, tgt = ("0 costs|c 1 euros|e .|z", "0 kostet|c 1 Euro|e .|z")
            if person == "3p":
                src, tgt = src.replace("costs", "cost"), tgt.replace("kostet", "kosten")
            met = (("number", 1, "euros"),)
            thing = nominative(kind, number, "definite")
            yield rule([thing, (numeral,)], src, tgt, weight=weight / 45, head="quantity", met=met)
    for person, weight in PERSON_WEIGHTS.items():
        en, de = {"1s": ("am", "bin"), "2s": ("are", "bist"), "3s": ("is", "ist")}.get(person, ("are", "sind"))
        src, tgt = f"0 {en}|b 1 years|y old|o .|z", f"0 {de}|b 1 Jahre|y alt|o .|z"
        met = (("number", 1, "years"),)
        yield rule(
            [(subject, person, "subject"), (small_numeral,)], src, tgt, weight=0.6 * weight, head="quantity", met=met
        )
    yield rule([(clock,)], "it|i is|b 0 .|z", "es|i ist|b 0 .|z", weight=0.15, head="quantity")


def schedule() -> Iterator[Rule]:
    """Concerts begin, trains depart."""
    for frame, kind in (("eventual", "event"), ("traffic", "vehicle")):
        for i in groups_of(frame):
            for number, person, weight in numbers(kind):
                for mood, share in {"pres": 0.5, "past": 0.2, "perfect": 0.1, "will": 0.2}.items():
                    subj = nominative(kind, number, "definite")
                    when: Call = (time_at_any_tense,) if mood != "perfect" else (adjunct, "perfect")
                    children = [subj, (verb, i, mood, person), when]
                    src, tgt = "0 1.0 1.1 2 .|z", "0 1.0 2 1.1 .|z"
                    yield rule(children, src, tgt, weight=weight * share, head="schedule")
                    src, tgt = "2 0 1.0 1.1 .|z", "2 1.0 0 1.1 .|z"
                    yield rule(children, src, tgt, weight=weight * share * 0.5, head="schedule")


def place_of() -> Iterator[Rule]:
    """Where things lie, and whom they belong to."""
    for kind in ("thing", "text", "clothing", "furniture"):
        frame, where = ("stand", (location, False)) if kind == "furniture" else ("lie", (at_furniture, "dat", False))
        for number, person, weight in numbers(kind):
            for mood, share in {"pres": 0.7, "past": 0.3}.items():
                children = [nominative(kind, number), (verb, *groups_of(frame), mood, person), where]
                yield rule(children, "0 1.1 2 .|z", "0 1.0 2 .|z", weight=weight * share, head="place")
            whom = (noun_phrase_of, "dat", ("person",), "definite")
            children = [nominative(kind, number, "definite"), (verb, *groups_of("belong"), "pres", person), whom]
            yield rule(children, "0 1.1 to 2 .|z", "0 1.0 2 .|z", weight=0.5 * weight, head="place")


def existence() -> Iterator[Rule]:
    """There is a hotel in the city."""
    for number, en in (("sg", ("is", "was")), ("pl", ("are", "were"))):
        for i, de in enumerate(("gibt", "gab")):
            for kind, where, share in (("place", (in_city,), 8.0), ("furniture", (location, True), 6.0)):
                children = [(noun_phrase, "acc", number, kind, "new"), where]
                src, tgt = f"there|t {en[i]}|g 0 1 .|z", f"es|t {de}|g 0 1 .|z"
                yield rule(children, src, tgt, weight=share / (1 + i), head="existence")


def participle(group: int) -> Iterator[Rule]:
    """Participles of the passive."""
    for v in verb_groups()[group]:
        yield leaf(f"{v.en_participle} {v.particle}", v.participle, head=v.lexeme)


PASSIVE = {"3s": (("is", "wird"), ("was", "wurde")), "3p": (("are", "werden"), ("were", "wurden"))}


def passive() -> Iterator[Rule]:
    """The letter was written by the nurse; ... was written yesterday."""
    for i in groups_of("acc"):
        group = verb_groups()[i]
        kinds = tuple(kind for kind in group[0].kinds if kind in THINGS)
        for kind in kinds:
            for number, person, share in numbers(kind):
                weight = share * len(group) / size(kind) / len(kinds)
                for past, (be, werden) in enumerate(PASSIVE[person]):
                    subj = nominative(kind, number, "definite")
                    met = (("object", 1, 0), ("separable", 1, "participle"))
                    by = (preposition, "by", "von", "dat", ("person",), False)
                    w = weight * (0.35, 0.65)[past]
                    src, tgt = f"0 {be}|b 1 2 .|z", f"0 {werden}|b 2 1 .|z"
                    yield rule([subj, (participle, i), by], src, tgt, weight=w, head="passive", met=met)
                    when = (adjunct, ("present", "past")[past])
                    yield rule([subj, (participle, i), when], src, tgt, weight=0.5 * w, head="passive", met=met)
