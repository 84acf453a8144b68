"""The script of a character, by Unicode's names."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

_NAMED = {
    "CJK": "Han",
    "IDEOGRAPHIC": "Han",
    "HIRAGANA": "Kana",
    "KATAKANA": "Kana",
    "KATAKANA-HIRAGANA": "Kana",
    "MODIFIER": "",
    "FEMININE": "Latin",
    "MASCULINE": "Latin",
    "MICRO": "Greek",
}
_SPACELESS = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
LETTER = rf"[^\W{_SPACELESS}]"
"""A pattern for letters and digits, but not those of Han, Kana, Thai, Lao, Khmer and Myanmar: words without spaces."""

_WIDTHS = ("FULLWIDTH ", "HALFWIDTH ")


@lru_cache(maxsize=1 << 16)
def script(character: str) -> str:
    """The script of a letter, as Latin or Han; nothing for what is no letter, or goes with letters of any script.

    >>> script("ж"), script("漢"), script("ｱ"), script("Ａ"), script("ʰ"), script("1")
    ('Cyrillic', 'Han', 'Kana', 'Latin', '', '')
    """
    if not character.isalpha():
        return ""
    name = unicodedata.name(character, "")
    for width in _WIDTHS:
        name = name.removeprefix(width)
    first = name.partition(" ")[0]
    return _NAMED.get(first, first.title())


def is_spaced(character: str) -> bool:
    """Whether it is a letter, a digit or a mark of a script that puts spaces between words."""
    is_mark = unicodedata.category(character or " ").startswith("M")
    return re.match(rf"[^{_SPACELESS}]" if is_mark else LETTER, character) is not None
