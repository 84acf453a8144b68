"""Adjuncts of the built-in corpus: when, how often, and why; dates, clock times, and prepositions with a genitive."""

from __future__ import annotations

from collections.abc import Iterator

from transduce.demo.numbers import (
    MONTHS,
    WEEKDAYS,
    clock_times,
    english_ordinal,
    english_year,
    german_ordinal,
    german_year,
)  # fmt: skip
from transduce.demo.phrases import noun_phrase, numeral
from transduce.demo.rules import Rule, leaf, rule, same

SEASONS = (("spring", "Frühling"), ("summer", "Sommer"), ("autumn", "Herbst"), ("winter", "Winter"))
DAYTIMES = (("morning", "Morgen"), ("afternoon", "Nachmittag"), ("evening", "Abend"))
# English singular and plural; German feminine?, singular, dative plural.
UNITS = (
    ("day", "Tag", "Tagen"),
    ("week", "Woche", "Wochen"),
    ("month", "Monat", "Monaten"),
    ("year", "Jahr", "Jahren"),
    ("hour", "Stunde", "Stunden"),
)
_ENDING = {"Woche": "e", "Jahr": "es", "Stunde": "e"}
OFTEN = (
    ("always", "immer"),
    ("often", "oft"),
    ("never", "nie"),
    ("sometimes", "manchmal"),
    ("usually", "meistens"),
    ("rarely", "selten"),
)
SO_FAR = (("already", "schon"), ("never", "nie"), ("often", "oft"), ("just", "gerade"))


def weekday() -> Iterator[Rule]:
    """Monday"""
    for en, de in WEEKDAYS:
        yield leaf(en, de, head=en)


def month() -> Iterator[Rule]:
    """May"""
    for en, de in MONTHS:
        yield leaf(en, de, head=en)


def day_of_month() -> Iterator[Rule]:
    """Third -> dritten; in the dative, after "am"."""
    for n in range(1, 32):
        yield leaf(english_ordinal(n), german_ordinal(n) + "n", head=english_ordinal(n))


def clock() -> Iterator[Rule]:
    """Half past seven -> halb acht"""
    for en, de, _ in clock_times():
        *before, last = en.split()
        *words, last_de = de.split()
        if before[-1:] in (["past"], ["to"]):
            # "quarter past three": word by word; "half past": both are "halb".
            half = before[0] == "half"
            start = "half|m past|m" if half else f"{before[0]}|m {before[1]}|p"
            start_de = "halb|m" if half else f"{words[0]}|m {words[1]}|p"
            yield leaf(f"{start} {last}|h", f"{start_de} {last_de}|h", head=en)
        else:
            yield leaf(f"{before[0]}|h {last}|u", f"{words[0]}|h {last_de}|u", head=en)


def year() -> Iterator[Rule]:
    """Nineteen eighty-four -> neunzehnhundertvierundachtzig"""
    for century in (17, 18, 19):
        for n in range(century * 100 + 10, century * 100 + 100):
            yield leaf(english_year(n), german_year(n), head=str(n))


def small_numeral() -> Iterator[Rule]:
    """Numbers from two to ninety-nine."""
    return (r for r in numeral() if len(str(r.head)) < 3)


def time_at_any_tense() -> Iterator[Rule]:
    """Times that go with every tense."""
    yield rule([(weekday,)], "on|a 0", "am|a 0", weight=2.0)
    yield rule([(month,)], "in|a 0", "im|a 0", weight=1.2)
    yield rule([(day_of_month,), (month,)], "on|a the|a 0 of 1", "am|a 0 1", weight=2.0)
    yield rule([(clock,)], "at|a 0", "um|a 0", weight=3.0)
    for en, de in SEASONS:
        yield leaf(f"in|a {en}|b", f"im|a {de}|b", weight=0.2)
    for en, de in DAYTIMES:
        yield leaf(f"in|a the|a {en}|b", f"am|a {de}|b", weight=0.4)


def ago_or_ahead(before: str, after: str, german: str) -> Iterator[Rule]:
    """Three days ago, in three days."""
    for en, _, de in UNITS:
        head = f"{en}s"
        src = f"{before} 0 {en}s|u {after}"
        yield rule([(small_numeral,)], src, f"{german}|a 0 {de}|u", head=head, met=(("number", 0, head),))


def cause() -> Iterator[Rule]:
    """Prepositions with a genitive, and before or after an event."""
    for en, de, case, kind, weight in (
        ("because of", "wegen", "gen", "cause", 0.35),
        ("despite", "trotz", "gen", "cause", 0.25),
        ("during", "während", "gen", "event", 0.2),
        ("before", "vor", "dat", "event", 0.15),
        ("after", "nach", "dat", "event", 0.15),
    ):
        start = " ".join(f"{word}|p" for word in en.split())
        yield rule(
            [(noun_phrase, case, "sg", kind, "definite" if kind == "event" else "the")],
            f"{start} 0",
            f"{de}|p 0",
            weight=weight,
        )


def _last_or_next(word: str, stem: str) -> Iterator[Rule]:
    for en, de in WEEKDAYS:
        yield leaf(f"{word}|a {en}|b", f"{stem}en|a {de}|b", weight=0.1)
    for en, de, _ in UNITS[1:4]:
        yield leaf(f"{word}|a {en}|b", f"{stem}{_ENDING.get(de, 'en')}|a {de}|b", weight=0.2)
    for en, de in SEASONS:
        yield leaf(f"{word}|a {en}|b", f"{stem}en|a {de}|b", weight=0.06)


def adjunct(tense: str) -> Iterator[Rule]:
    """When or why; `tense` is present, past, future, perfect, "not present" or "first past".

    "not present" is for negated clauses and has no "every day": under "not" it would mean two things. "first past" has
    no "three days ago": a sentence that begins with a number in words is bad style.
    """
    yield same((cause,), weight=0.18)
    if tense != "perfect":
        yield same((time_at_any_tense,), weight=0.5)
    if tense.endswith("present"):
        for en, de in (("today", "heute"), ("now", "jetzt")):
            yield leaf(en, de, weight=0.06)
    if tense == "present":
        for en, de in (
            ("day", "jeden Tag"),
            ("week", "jede Woche"),
            ("year", "jedes Jahr"),
            *((e, f"jeden {d}") for e, d in (*DAYTIMES, *WEEKDAYS)),
        ):
            every, noun = de.split()
            yield leaf(f"every|a {en}|b", f"{every}|a {noun}|b", weight=0.015)
    if tense in ("past", "first past"):
        yield leaf("yesterday", "gestern", weight=0.08)
        yield rule([(year,)], "in|a 0", "im|a Jahr|a 0", weight=0.09)
        if tense == "past":
            yield same((ago_or_ahead, "", "ago|a", "vor"), weight=0.12)
        yield same((last,), weight=0.08)
    elif tense == "future":
        yield leaf("tomorrow", "morgen", weight=0.08)
        yield same((ago_or_ahead, "in|a", "", "in"), weight=0.14)
        yield same((next_,), weight=0.08)
    if tense == "perfect":
        for en, de in (
            ("today", "heute"),
            ("this|a week|b", "diese|a Woche|b"),
            ("this|a morning|b", "heute|a Morgen|b"),
            ("this|a year|b", "dieses|a Jahr|b"),
        ):
            yield leaf(en, de, weight=0.08)


def last() -> Iterator[Rule]:
    """Last week -> letzte Woche"""
    yield from _last_or_next("last", "letzt")


def next_() -> Iterator[Rule]:
    """Next Monday -> nächsten Montag"""
    yield from _last_or_next("next", "nächst")


def often(perfect: bool) -> Iterator[Rule]:
    """Adverbs that stand before the verb in English."""
    for en, de in SO_FAR if perfect else OFTEN:
        yield leaf(en, de)
