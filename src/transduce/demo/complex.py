"""Sentences of several clauses of the built-in corpus, and the start of the grammar.

German subordinate clauses end in their verb; a clause after a subordinate one begins with its verb; "it" takes the
gender of the German noun that it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator

from transduce.demo.adjuncts import adjunct
from transduce.demo.lexicon import ARTICLES, GENDERS, ending, lexicon
from transduce.demo.phrases import (
    IT,
    noun_phrase,
    noun_phrase_of,
    nouns_of,
    one_adjective,
    other_adjective,
    predicate_adjective,
    split_subject,
    subject,
)  # fmt: skip
from transduce.demo.predicates import at_furniture, direction, groups_of, location, predicate, verb, verb_groups
from transduce.demo.rules import Call, Rule, Symbol, rule, same, symbol
from transduce.demo.sentences import (
    THINGS,
    existence,
    frequency,
    negation,
    object_question,
    passive,
    place_of,
    property_of,
    quantity,
    question,
    schedule,
    separable,
    spread,
    statement,
    tense_of,
    where,
    who,
)  # fmt: skip

# Conjunctions: English, German, moods of (main, subordinate) clause, weight.
_FREE = (
    ("pres", "pres"),
    ("past", "past"),
    ("pres", "perfect"),
    ("will", "pres"),
    ("pres", "want"),
    ("perfect", "past"),
)
_SAME = (("pres", "pres"), ("past", "past"))
_AHEAD = (("pres", "pres"), ("will", "pres"), ("can", "pres"), ("must", "pres"))
CONJUNCTIONS = (
    ("because", "weil", _FREE, 0.34),
    ("although", "obwohl", _FREE, 0.2),
    ("if", "wenn", _AHEAD, 0.16),
    ("when", "als", (("past", "past"),), 0.1),
    ("when", "wenn", (("pres", "pres"),), 0.1),
    ("while", "während", _SAME, 0.07),
    ("before", "bevor", _SAME, 0.07),
)


def main_clause(mood: str, inverted: bool) -> Iterator[Rule]:
    """A short main clause; inverted where something stands before it in German."""
    tgt = "1.0 0.0 1.1 0.1 1.2 1.3 1.4" if inverted else "0 1.0 1.1 1.2 1.3 1.4"
    for _, person, weight in spread({mood: 1.0}):
        children = [(split_subject if inverted else subject, person, "light"), (predicate, mood, person, False, True)]
        yield rule(children, "0 1.0 1.1", tgt, weight=weight, met=separable(mood, 1))


def subordinate(mood: str) -> Iterator[Rule]:
    """A short subordinate clause without its conjunction: the verb last."""
    for _, person, weight in spread({mood: 1.0}):
        children = [(subject, person, "light"), (predicate, mood, person, False, True)]
        yield rule(children, "0 1.0 1.1", "0 1.1 1.2 1.3 1.5", weight=weight, met=separable(mood, 1, "joined"))


def subordinate_with_adjunct(mood: str) -> Iterator[Rule]:
    """A subordinate clause that also says when or why."""
    for _, person, weight in spread({mood: 1.0}):
        children = [(subject, person, "light"), (predicate, mood, person, False, True), (adjunct, tense_of(mood))]
        yield rule(children, "0 1.0 1.1 2", "0 1.1 1.2 2 1.3 1.5", weight=weight, met=separable(mood, 1, "joined"))


def adverbial_clause() -> Iterator[Rule]:
    """because, although, if, when...: after the main clause or before it."""
    for en, de, moods, weight in CONJUNCTIONS:
        for main, sub in moods:
            w = weight / len(moods)
            children: list[Call] = [(main_clause, main, False), (subordinate, sub)]
            if en != "if":  # "she forgets the question if he sings" could mean a question
                yield rule(children, f"0 {en}|c 1 .|z", f"0 , {de}|c 1 .|z", weight=0.5 * w, head="clause last")
            children = [(main_clause, main, True), (subordinate, sub)]
            yield rule(children, f"{en}|c 1 ,|k 0 .|z", f"{de}|c 1 ,|k 0 .|z", weight=0.5 * w, head="clause first")


_SAID = {"pres": {"pres": 0.3, "perfect": 0.25, "past": 0.15, "will": 0.2, "can": 0.1}, "past": {"past": 1.0}}


def content_clause() -> Iterator[Rule]:
    """She says that...; he asks whether, knows why..."""
    for frame, words in (
        ("that", (("that", "dass"),)),
        ("whether", (("whether", "ob"), ("why", "warum"), ("when", "wann"))),
    ):
        for outer, person, weight in spread({"pres": 0.7, "past": 0.3}):
            for inner, share in _SAID[outer].items():
                for en, de in words:
                    src, tgt = f"0 1.1 {en}|c 2 .|z", f"0 1.0 , {de}|c 2 .|z"
                    w = weight * share / len(words) * (0.6 if frame == "that" else 0.4)
                    for clause, part in ((subordinate, 0.6), (subordinate_with_adjunct, 0.4)):
                        children = [
                            (subject, person, "light"),
                            (verb, *groups_of(frame), outer, person),
                            (clause, inner),
                        ]
                        yield rule(children, src, tgt, weight=w * part, head="content clause")


def infinitive_clause() -> Iterator[Rule]:
    """She tries to..., goes into the garden in order to...: infinitives with zu."""
    for mood, person, weight in spread({"pres": 0.5, "past": 0.25, "perfect": 0.25}):
        what: Call = (predicate, "to", person, False, False)
        children: list[Call] = [(subject, person, "light"), (verb, *groups_of("to"), mood, person), what]
        met = (*separable(mood, 1), *separable("to", 2))
        src, tgt = "0 1.0 1.1 2.1 .|z", "0 1.0 1.1 , 2.1 2.2 2.3 2.4 .|z"
        yield rule(children, src, tgt, weight=0.65 * weight, head="infinitive", met=met)
        children = [(subject, person, "light"), (verb, *groups_of("motion"), mood, person), (direction, True), what]
        src, tgt = "0 1.0 1.1 2 in|u order|u 3.1 .|z", "0 1.0 2 1.1 , um|u 3.1 3.2 3.3 3.4 .|z"
        yield rule(children, src, tgt, weight=0.35 * weight, head="infinitive", met=separable("to", 3))


def relative_pronoun(case: str, column: str) -> str:
    """der, den, dem...: the article, but for the dative plural."""
    return "denen" if (case, column) == ("dat", "pl") else ending(ARTICLES["der"], case, column)


def relative(kind: str, column: str) -> Iterator[Rule]:
    """A relative clause after a noun of a class and a gender (or the plural); it begins with a comma in German."""
    person = "3p" if column == "pl" else "3s"
    if kind == "person":
        who = relative_pronoun("nom", column)
        for mood in ("pres", "past"):
            children: list[Call] = [(predicate, mood, person, False, True)]
            src, tgt = "who|r 0.0 0.1", f", {who}|r 0.1 0.2 0.3 0.5"
            yield rule(children, src, tgt, weight=12.0, met=separable(mood, 0, "joined"))
    for frame in ("acc", "dat"):
        for i in groups_of(frame):
            if kind in verb_groups()[i][0].kinds:
                for mood, subj, weight in spread({"pres": 0.5, "past": 0.3, "perfect": 0.2}):
                    children = [(subject, subj, "light"), (verb, i, mood, subj)]
                    src = f"{'whom' if kind == 'person' else 'that'}|r 0 1.0 1.1"
                    tgt = f", {relative_pronoun(frame, column)}|r 0 1.2"
                    yield rule(
                        children, src, tgt, weight=weight * len(verb_groups()[i]), met=separable(mood, 1, "joined")
                    )
    if kind == "place":
        for i in groups_of("social", "stay"):
            for mood, subj, weight in spread({"pres": 0.6, "past": 0.4}):
                children = [(subject, subj, "light"), (verb, i, mood, subj)]
                tgt = f", in|p {relative_pronoun('dat', column)}|r 0 1.2"
                yield rule(children, "in|p which|r 0 1.1", tgt, weight=weight, met=separable(mood, 1, "joined"))


def relative_sentence() -> Iterator[Rule]:
    """The man who sings is tired. She knows the house in which he lives."""
    for number, person in (("sg", "3s"), ("pl", "3p")):
        for gender in GENDERS:
            column = gender if number == "sg" else "pl"
            for mood, weight in {"pres": 0.5, "past": 0.3, "perfect": 0.2}.items():
                head: Call = (noun_phrase, "nom", number, "person", "the", gender)
                children: list[Call] = [head, (relative, "person", column), (predicate, mood, person, False, True)]
                w = weight * len(nouns_of("person", gender)) * (1.0 if number == "sg" else 0.4)
                src, tgt, met = "0 1 2.0 2.1 .|z", "0 1 , 2.0 2.1 2.2 2.3 2.4 .|z", separable(mood, 2)
                yield rule(children, src, tgt, weight=w, head="relative clause", met=met)
    for i in groups_of("acc"):
        group = verb_groups()[i]
        for kind in group[0].kinds:
            for gender in GENDERS:
                nouns = len(nouns_of(kind, gender))
                for mood, person, weight in spread({"pres": 0.4, "past": 0.3, "perfect": 0.3}) if nouns else ():
                    thing: Call = (noun_phrase, "acc", "sg", kind, "light", gender)
                    children = [(subject, person, "light"), (verb, i, mood, person), thing, (relative, kind, gender)]
                    met = (("object", 1, 2), *separable(mood, 1))
                    src, tgt = "0 1.0 1.1 2 3 .|z", "0 1.0 2 1.1 3 .|z"
                    w = 0.3 * weight * nouns * len(group) / len(group[0].kinds)
                    yield rule(children, src, tgt, weight=w, head="relative clause", met=met)


def it() -> Iterator[Rule]:
    """Pronouns of things: er, sie, es by the gender of the noun."""
    for kind in THINGS:
        for gender in GENDERS:
            w = float(len(nouns_of(kind, gender)))
            if not w:
                continue
            he, one = f"{IT[gender]['nom']}|t", (noun_phrase, "nom", "sg", kind, "definite", gender)
            plain: Call = (noun_phrase, "nom", "sg", kind, "light", gender)
            adjectives = [a.en for a in lexicon().adjectives if kind in a.kinds]
            for a in adjectives:
                src, tgt = "0 is|b 1 but|c it|t is|i 2 .|z", f"0 ist|b 1 , aber|c {he} ist|i 2 .|z"
                met = (("adjective", 1, 0), ("adjective", 2, 0))
                children = [plain, (one_adjective, a), (other_adjective, kind, a)]
                yield rule(children, src, tgt, weight=0.3 / len(adjectives) * w, head="it", met=met)
            if kind in ("thing", "text", "clothing", "furniture"):
                frame, where = (
                    ("stand", (location, False)) if kind == "furniture" else ("lie", (at_furniture, "dat", False))
                )
                children = [one, (verb, *groups_of(frame), "pres", "3s"), where]
                src, tgt = "where|w is|b 0 ?|q it|t 1.1 2 .|z", f"wo|w ist|b 0 ?|q {he} 1.0 2 .|z"
                yield rule(children, src, tgt, weight=0.7 * w, head="it")
            yield from _it_as_object(kind, gender, w)


def _it_as_object(kind: str, gender: str, weight: float) -> Iterator[Rule]:
    """She buys the lamp because it is cheap. He finds the key and gives it to the man."""
    he, him = f"{IT[gender]['nom']}|t", f"{IT[gender]['acc']}|t"
    for i in groups_of("acc"):
        group = verb_groups()[i]
        if kind not in group[0].kinds:
            continue
        thing: Call = (noun_phrase, "acc", "sg", kind, "light", gender)
        for mood, person, share in spread({"pres": 0.4, "past": 0.3, "perfect": 0.3}):
            w = share * weight * len(group) / 10
            be, de = ("was", "war") if mood == "past" else ("is", "ist")
            children: list[Call] = [
                (subject, person, "light"),
                (verb, i, mood, person),
                thing,
                (predicate_adjective, kind),
            ]
            met = (("object", 1, 2), ("adjective", 3, 2), *separable(mood, 1))
            src, tgt = f"0 1.0 1.1 2 because|c it|t {be}|b 3 .|z", f"0 1.0 2 1.1 , weil|c {he} 3 {de}|b .|z"
            yield rule(children, src, tgt, weight=0.4 * w, head="it", met=met)
            for j in groups_of("both"):
                if mood != "perfect" and kind in verb_groups()[j][0].kinds:
                    whom = (noun_phrase_of, "dat", ("person",), "light")
                    children = [
                        (subject, person, "light"),
                        (verb, i, mood, person),
                        thing,
                        (verb, j, mood, person, True),
                        whom,
                    ]
                    met = (("object", 1, 2), *separable(mood, 1), *separable(mood, 3))
                    src, tgt = "0 1.1 2 and|c 3.1 it|t 3.2 to 4 .|z", f"0 1.0 2 1.1 und|c 3.0 {him} 4 3.1 .|z"
                    yield rule(children, src, tgt, weight=0.3 * w, head="it", met=met)


SENTENCES = {
    statement: 0.22,
    frequency: 0.05,
    negation: 0.08,
    question: 0.08,
    who: 0.015,
    object_question: 0.035,
    where: 0.01,
    property_of: 0.05,
    quantity: 0.04,
    schedule: 0.03,
    place_of: 0.03,
    existence: 0.015,
    passive: 0.04,
    adverbial_clause: 0.09,
    content_clause: 0.06,
    infinitive_clause: 0.05,
    relative_sentence: 0.05,
    it: 0.06,
}


def sentence() -> Iterator[Rule]:
    """Any sentence."""
    for category, weight in SENTENCES.items():
        yield same((category,), weight=weight)


def start() -> Symbol:
    """The start symbol of the grammar."""
    return symbol((sentence,))
