"""Find the parts of a text that a translation must preserve: URLs, placeholders, numbers, glossary terms."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

from transduce.text.languages import DIGITS, IN_TOKEN, LETTER, LETTER_WITHOUT_SPACES, NARROW_SPACE

NUMBER = (
    rf"(?<!{LETTER})(?<!{LETTER}[-./_'’])"  # excludes ends of words such as B2 or COVID-19
    r"(?:(?<![^\s(\[])[-+−])?"
    rf"{DIGITS}Z?(?!{LETTER})(?:{NARROW_SPACE}?[%％‰](?!{LETTER}))?"
)
"""A pattern for numbers (`DIGITS`) with a sign, and for percentages."""

_ARGUMENT = r"[^{}]"  # ICU placeholders: balanced braces, except quoted ones
for _ in range(6):
    _ARGUMENT = rf"(?:'[{{}}#|][^']*'|[^{{}}]|\{{{_ARGUMENT}*+\}})"
_FIELD = r"\w*(?:\.\w+|\[[^\[\]{}]{1,80}\])*"
_SIZE = r"(?:\d{1,3}|\*(?:\d{1,2}\$)?)?"
_PRINTF = (
    rf"%(?:\([^()]{{1,80}}\)|\d{{1,2}}\$|<)?[-+0#',(]{{0,7}}{_SIZE}(?:\.{_SIZE})?"
    r"(?:[tT][A-Za-z]|(?:hh?|ll?|[qjzZtL]|I64|I32)?[aAbBcCdDeEfFgGhHinoOprsSuUxX@])"
)
_PLACEHOLDERS = (
    r"\{[{%#]{1,2}[^{}]{1,200}[}%#]{1,2}\}",  # {{ name }}, {{{name}}}, {% if x %}
    r"\{\s*\w+\s*,\s*(?:number|date|time|spellout|ordinal|duration|plural|select|selectordinal|choice)"
    rf"\s*(?:,{_ARGUMENT}*+)?\}}",  # ICU and Java
    rf"\{{{_FIELD}(?:![rsa])?(?::(?:[^{{}}]|\{{{_FIELD}\}})*+)?\}}",  # {name!r:>{width}} of Python
    r"[$#%]?\{\s?[^{}\s]{0,80}\s?\}|\$\{[^{}]{1,80}\}",  # {name}, #{name}, %{name}, ${a + b}
    rf"(?<!{LETTER})\$(?!\d){LETTER}+",  # $name
    r"</?\d{1,4}/?>",  # <0>
    r"%[^\W\d][\w.-]{1,80}%(?![-+0#',(.*\d]*[\w@%])|%(?:\d{1,2}\$)?#@\w{1,80}@|%%",  # %name%, %#@name@
    rf"(?<!\d){_PRINTF}|{_PRINTF}(?!\w)",  # format specifiers of C, Objective-C, Java and Python, but not 100%ige
)

_NAME_WITHOUT_SPACES = f"(?:{LETTER_WITHOUT_SPACES}){{1,63}}"
_LABEL = rf"(?:(?:{LETTER}|-){{1,63}}|{_NAME_WITHOUT_SPACES})"  # a label of a domain name

Kind = Literal["urls", "emails", "mentions", "placeholders", "numbers"]

KINDS: dict[Kind, str] = {
    "urls": rf"""(?:https?://|www\.)(?:(?![<>{{}}"']){IN_TOKEN}){{1,2000}}(?<![.,;:!?)\]])""",
    "emails": rf"(?<!{LETTER})(?<![.+-])(?:{LETTER}|[.+-]){{1,64}}@{_LABEL}(?:\.{_LABEL}){{1,8}}",
    "mentions": rf"(?<!{LETTER})(?<![.@%])@(?:{LETTER}(?:{LETTER}|[.-]){{0,63}}(?<![.-])|{_NAME_WITHOUT_SPACES})",
    "placeholders": "|".join(_PLACEHOLDERS),
    "numbers": NUMBER,
}
"""Patterns for each kind of part that can be preserved, in the order in which they are tried."""

DEFAULT_KINDS: tuple[Kind, ...] = ("urls", "emails", "mentions", "placeholders")
"""The kinds that are preserved by default. Numbers are not, because languages write them in different ways."""

OTHER = 2
"""Index of the pattern for any number in the result of `forms_of`."""

_LONGEST = 100  # maximum characters of a number that may get other separators
_EDGE = re.compile(LETTER)
_WHOLE = re.compile(NUMBER)
_WORD = re.compile(LETTER * 2)
_BORDER = re.compile(rf"(?<!{LETTER}).|.(?<!{LETTER})", re.DOTALL)


def find_kinds(text: str, kinds: Collection[Kind]) -> Iterator[tuple[int, int, str]]:
    """Find parts of these kinds. Yields (start, end, text)."""
    pattern = re.compile("|".join(form for kind, form in KINDS.items() if kind in kinds))
    return ((m.start(), m.end(), m[0]) for m in pattern.finditer(text) if m[0])


def find_terms(text: str, terms: Mapping[str, str]) -> Iterator[tuple[int, int, str]]:
    """Find a glossary's terms. Yields (start, end, translation).

    Terms match whole words in the same case, the longest first.
    """
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
    """Patterns to find a preserved part in a translation, the most exact first.

    A number may have other separators. The last pattern for a number matches any number.

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
    percent = r"\s?[%％]" if text[-1] in "%％" else r"\s?‰" if text[-1] == "‰" else ""
    return [
        rf"(?<!{LETTER})(?<!\d[^\w\s]){form}(?!{LETTER}|[^\w\s]\d)"
        for form in (re.escape(text), sign + digits + percent)
    ] + [NUMBER]
