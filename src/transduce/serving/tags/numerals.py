"""Numbers in digits, with separators: 1,000.50, 1 000,5 %, 2026-11-22, 14:25."""

from __future__ import annotations

import re

from transduce.text.scripts import LETTER

_SPACES = r"[ \u00a0\u2009\u202f]"
NUMBER = (
    rf"(?<!{LETTER})(?<!{LETTER}[-./_'’])"  # not the end of a word such as B2 or COVID-19
    r"(?:(?<![^\s(\[])[-+−])?"
    rf"(?>\d{{1,3}}(?:{_SPACES}\d{{3}}(?!\d))+|\d+)(?>(?:[-.,:/'’–٫٬T]\d+)*)Z?(?!{LETTER})"
    rf"(?:{_SPACES}?[%‰](?!{LETTER}))?"
)
"""A pattern for integers, decimals with either separator, thousands, percentages, and dates and times."""

OTHER = 2
"""Place in `forms_of` of the pattern for other numbers."""

_LONGEST = 100  # of a number that may have other separators
_EDGE = re.compile(LETTER)
_WHOLE = re.compile(NUMBER)


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
