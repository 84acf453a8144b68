"""Find the parts of a text that a translation must keep: addresses, placeholders, terms of a glossary."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from transduce.text.projection import Element

MOST_PARTS = 100
"""Parts of a text that are kept; others are translated like any text."""

_WORD = re.compile(r"\w\w")
_PATTERN = re.compile(
    r"""(?:https?://|www\.)[^\s<>{}"']{1,2000}(?<![.,;:!?)\]])"""  # web addresses
    r"""|(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}"""  # e-mail addresses
    r"""|\{\{[^{}]{1,80}\}\}|[$#]?\{[^{}\s]{0,80}\}"""  # {{ name }}, {name}, ${name}, #{name}
    r"""|%(?:\(\w{1,80}\)|\d{1,2}\$)?[-+0#]{0,5}\d{0,3}(?:\.\d{1,3})?[sdifgxXcoeEu@](?!\w)"""  # %s, %(name)s, %1$d
    r"""|</?\d{1,4}/?>"""  # <0>
)


def protect(root: Element, text: str, escape: Callable[[str], str]) -> None:
    """Keep web and e-mail addresses and placeholders."""
    _keep(root, text, ((m.start(), m.end(), m[0]) for m in _PATTERN.finditer(text)), escape)


def use_glossary(root: Element, text: str, terms: Mapping[str, str], escape: Callable[[str], str]) -> None:
    """Translate terms as the glossary says: whole words in the same case, the longest term first."""
    _keep(root, text, _terms(text, terms), escape)


def _terms(text: str, terms: Mapping[str, str]) -> Iterator[tuple[int, int, str]]:
    lengths = sorted({len(term) for term in terms}, reverse=True)
    end = 0
    for border in re.finditer(r"\b\w|\W", text):
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
