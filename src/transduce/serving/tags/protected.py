"""Find the parts of a text that a translation must keep: addresses, placeholders, numbers, terms of a glossary."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal

from transduce.serving.tags.numerals import NUMBER
from transduce.serving.tags.transfer import Element
from transduce.text.scripts import LETTER

MOST_PARTS = 100
"""Parts of a text that are kept; others are translated like any text."""

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

_WORD = re.compile(LETTER * 2)
_BORDER = re.compile(rf"(?<!{LETTER}).|.(?<!{LETTER})", re.DOTALL)


def protect(root: Element, text: str, escape: Callable[[str], str], kinds: Collection[Kind] = DEFAULT_KINDS) -> None:
    """Keep parts of these kinds."""
    pattern = re.compile("|".join(form for kind, form in KINDS.items() if kind in kinds))
    _keep(root, text, ((m.start(), m.end(), m[0]) for m in pattern.finditer(text) if m[0]), escape)


def use_glossary(root: Element, text: str, terms: Mapping[str, str], escape: Callable[[str], str]) -> None:
    """Translate terms as the glossary says: whole words in the same case, the longest term first."""
    _keep(root, text, _terms(text, terms), escape)


def _terms(text: str, terms: Mapping[str, str]) -> Iterator[tuple[int, int, str]]:
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


def _keep(root: Element, text: str, found: Iterator[tuple[int, int, str]], escape: Callable[[str], str]) -> None:
    for number, (start, end, copy) in enumerate(found):
        if number == MOST_PARTS:
            return
        root.protect(start, end, escape(copy), copy)
