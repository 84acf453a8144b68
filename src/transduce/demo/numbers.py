"""Numbers, dates and clock times in words, in English and in German."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_EN_TEENS = _words("ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen")
_DE_TEENS = _words("zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn")
_EN_SMALL = _words("zero one two three four five six seven eight nine") + _EN_TEENS
_DE_SMALL = _words("null eins zwei drei vier fünf sechs sieben acht neun") + _DE_TEENS
_EN_TENS = _words("- - twenty thirty forty fifty sixty seventy eighty ninety")
_DE_TENS = _words("- - zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")
_EN_ORDINALS = dict(
    zip(
        _words("one two three five eight nine twelve"),
        _words("first second third fifth eighth ninth twelfth"),
        strict=True,
    )
)
_DE_ORDINALS = {1: "erste", 3: "dritte", 7: "siebte", 8: "achte"}

WEEKDAYS = tuple(
    zip(
        _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
        _words("Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag"),
        strict=True,
    )
)
MONTHS = tuple(
    zip(
        _words("January February March April May June July August September October November December"),
        _words("Januar Februar März April Mai Juni Juli August September Oktober November Dezember"),
        strict=True,
    )
)


def english_number(n: int) -> str:
    """0 to 999 in words.

    >>> english_number(321)
    'three hundred and twenty-one'
    """
    if n < 20:
        return _EN_SMALL[n]
    if n < 100:
        return _EN_TENS[n // 10] + (f"-{_EN_SMALL[n % 10]}" if n % 10 else "")
    hundreds = f"{_EN_SMALL[n // 100]} hundred"
    return f"{hundreds} and {english_number(n % 100)}" if n % 100 else hundreds


def german_number(n: int) -> str:
    """0 to 999 in words, as one word.

    >>> german_number(321)
    'dreihunderteinundzwanzig'
    """
    if n < 20:
        return _DE_SMALL[n]
    if n < 100:
        ones = "ein" if n % 10 == 1 else _DE_SMALL[n % 10]
        return (f"{ones}und" if n % 10 else "") + _DE_TENS[n // 10]
    hundreds = ("ein" if n < 200 else _DE_SMALL[n // 100]) + "hundert"
    return hundreds + (german_number(n % 100) if n % 100 else "")


def english_ordinal(n: int) -> str:
    """1 to 99: first, twenty-third."""
    head, dash, last = english_number(n).rpartition("-")
    last = _EN_ORDINALS.get(last) or (last[:-1] + "ieth" if last.endswith("y") else last + "th")
    return head + dash + last


def german_ordinal(n: int) -> str:
    """1 to 99, with the ending of the nominative after an article: erste, dreiundzwanzigste."""
    return _DE_ORDINALS.get(n) or german_number(n) + ("te" if n < 20 else "ste")


def english_year(year: int) -> str:
    """1999 -> nineteen ninety-nine; the last two digits at least 10."""
    return f"{english_number(year // 100)} {english_number(year % 100)}"


def german_year(year: int) -> str:
    """1999 -> neunzehnhundertneunundneunzig"""
    return f"{german_number(year // 100)}hundert{german_number(year % 100)}"


def clock_times() -> list[tuple[str, str, int]]:
    """All clock times as (English, German, hour that is named in German), without the preposition.

    Half past seven is "halb acht": German counts towards the next hour.
    """
    times = []
    for hour in range(1, 13):
        following = hour % 12 + 1
        en, de = english_number(hour), german_number(hour)
        times.append((f"{en} o'clock", f"{'ein' if hour == 1 else de} Uhr", hour))
        times.append((f"half past {en}", f"halb {german_number(following)}", following))
        for en_minutes, de_minutes in (
            ("quarter", "Viertel"),
            ("five", "fünf"),
            ("ten", "zehn"),
            ("twenty", "zwanzig"),
        ):
            times.append((f"{en_minutes} past {en}", f"{de_minutes} nach {de}", hour))
            times.append((f"{en_minutes} to {en}", f"{de_minutes} vor {de}", hour))
    return times
