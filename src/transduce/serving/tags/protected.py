"""Find the parts of a text that a translation must keep: addresses, placeholders, numbers, terms of a glossary."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

from transduce.text.scripts import LETTER

_SPACES = r"[ \u00a0\u2009\u202f]"
NUMBER = (
    rf"(?<!{LETTER})(?<!{LETTER}[-./_'’])"  # not the end of a word such as B2 or COVID-19
    r"(?:(?<![^\s(\[])[-+−])?"
    rf"(?>\d{{1,3}}(?:{_SPACES}\d{{3}}(?!\d))+|\d+)(?>(?:[-.,:/'’–٫٬T]\d+)*)Z?(?!{LETTER})"
    rf"(?:{_SPACES}?[%‰](?!{LETTER}))?"
)
"""A pattern for integers, decimals with either separator, thousands, percentages, and dates and times."""

Kind = Literal["urls", "emails", "placeholders", "numbers"]

KINDS: dict[Kind, str] = {
    "urls": r"""(?:https?://|www\.)[^\s<>{}"']{1,2000}(?<![.,;:!?)\]])""",
    "emails": r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}",
    "placeholders": (
        r"\{\{[^{}]{1,80}\}\}|[$#]?\{[^{}\s]{0,80}\}"  # {{ name }}, {name}, ${name}, #{name}
        r"|%(?:\(\w{1,80}\)|\d{1,2}\$)?[-+0#]{0,5}\d{0,3}(?:\.\d{1,3})?[sdifgxXcoeEu@](?!\w)"  # %s, %(name)s, %1$d
        r"|</?\d{1,4}/?>"  # <0>
    ),
    "numbers": NUMBER,
}
"""Patterns of what can stay, in the order in which they are tried."""

DEFAULT_KINDS: tuple[Kind, ...] = ("urls", "emails", "placeholders")
"""Without numbers, which languages write in different ways."""

OTHER = 2
"""Place in `forms_of` of the pattern for other numbers."""

_LONGEST = 100  # of a number that may have other separators
_EDGE = re.compile(LETTER)
_WHOLE = re.compile(NUMBER)
_WORD = re.compile(LETTER * 2)
_BORDER = re.compile(rf"(?<!{LETTER}).|.(?<!{LETTER})", re.DOTALL)


def find_kinds(text: str, kinds: Collection[Kind]) -> Iterator[tuple[int, int, str]]:
    """Places of parts of these kinds, and the parts."""
    pattern = re.compile("|".join(form for kind, form in KINDS.items() if kind in kinds))
    return ((m.start(), m.end(), m[0]) for m in pattern.finditer(text) if m[0])


def find_terms(text: str, terms: Mapping[str, str]) -> Iterator[tuple[int, int, str]]:
    """Places of a glossary's terms, and their translations: whole words in the same case, the longest term first."""
    lengths = sorted({len(term) for term in terms}, reverse=True)
    end = 0
    for border in _BORDER.finditer(text):
        start = border.start()
        for length in lengths if start >= end else ():
            stop = start + length
            if text[start:stop] in terms and stop <= len(text) and not _WORD.match(text[stop - 1 : stop + 1]):
                yield start, stop, terms[text[start:stop]]
                end = stop
                break


def forms_of(text: str) -> list[str]:
    """Patterns for what a translation may have for a part that stays, the most exact first.

    A number may be there with other separators; after that, any number will do.

    >>> [bool(re.search(form, "1.000,5 m")) for form in forms_of("1,000.5")]
    [False, True, True]
    """
    if len(text) > _LONGEST or not _WHOLE.fullmatch(text):
        before, after = (
            rf"(?{look}{LETTER})" * bool(_EDGE.match(edge)) for look, edge in (("<!", text[:1]), ("!", text[-1:]))
        )
        return [before + re.escape(text) + after]
    digits = r"[^\w\n]?".join(re.findall(r"\d", text))
    sign = "[-+−]" if text[0] in "-+−" else ""
    percent = rf"\s?{text[-1]}" if text[-1] in "%‰" else ""
    return [
        rf"(?<!{LETTER})(?<!\d[^\w\s]){form}(?!{LETTER}|[^\w\s]\d)"
        for form in (re.escape(text), sign + digits + percent)
    ] + [NUMBER]
