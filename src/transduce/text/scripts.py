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
_UNSPACED_SYLLABLES = r"\u0e00-\u109f\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\u1b00-\u1b7f\ua980-\ua9df\uaa60-\uaadf"
_SPACELESS = _UNSPACED_SYLLABLES + r"\u2e80-\ua4cf\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
LETTER = rf"[^\W{_SPACELESS}]"
"""A pattern for letters and digits, but not those of scripts that put no spaces between words: Han, Kana, Yi, Thai,
Lao, Tibetan, Khmer, Myanmar, Tai, Balinese and Javanese.
"""

_VOWELS_BEFORE = "เแโใไເແໂໃໄᦵᦶᦷᦺꪵꪶꪹꪻꪼ"
_VOWELS_BEHIND = "ะาำๅະາຳຽ"
"""Vowel letters written before and after the consonant that they follow in speech: Thai, Lao, New Tai Lue, Tai Viet."""
_STACKING = "\u1039\u1a60\u1b44\u17d2\ua9c0"
"""Signs that put the next consonant below the one before: Myanmar, Tai Tham, Balinese, Khmer, Javanese."""

LETTER_WITHOUT_SPACES = rf"(?=\w)[{_SPACELESS}]"
"""A pattern for letters of scripts without spaces (see `LETTER`)."""

IN_TOKEN = rf"(?:[^\s{_SPACELESS}\uff01-\uff65“”‘’«»…—]|(?<=[./?=&#@:\\_%+-])(?:{LETTER_WITHOUT_SPACES})++)"
"""A pattern for parts of an address or of code. Letters of scripts without spaces belong to it only after one of its
signs; otherwise they begin the next word.
"""

LONG_WORD = rf"[^\s{_SPACELESS}]{{101,}}"
"""A pattern for strings that are too long to be a word, such as encoded data."""

ENTITY = r"&(?:#\w{1,8}|[A-Za-z]\w{1,31});"
"""A pattern for the name of a character in HTML, such as &nbsp;, or &apos; in text that Moses has tokenized."""

INLINE = (
    rf"{ENTITY}|\x1b\[[\d;]{{0,20}}m"
    r"|\]\([^\s()]{1,2000}(?:\([^\s()]{0,100}\)[^\s()]{0,100})?(?:[ ]\"[^\"\n]{0,300}\")?\)"
)
"""A pattern for parts that may touch a word without being part of it: entities, the colors of a terminal, and targets
of links in Markdown with the bracket before them.
"""

CODE = (
    r"`+[^`\n]+`+|\{\{[^{}\n]*\}\}|\{%[^\n]*?%\}|\{\s*[\w.]+\s*\}"  # `x`, {{ x }}, {% x %}, {x}
    r"|\{\s*\w+\s*,\s*(?:plural|select|selectordinal|number|date|time)\b(?:[^{}\n]|\{[^{}\n]*\})*\}"
    rf"|{INLINE}|(?<![\w:]):[a-z][\w+-]*:(?![\w:])"  # :smile:
    r"|(?<!\S)(?:(?:~|\.\.)/|\*?\.(?=[a-z]))[\w./*-]*\w"  # ../name, *.py
    r"|(?<!\S)--[a-z][a-z\d]*(?:-[a-z\d]+)*(?:=\S*\w)?(?![\w-])|(?<!\w)[A-Za-z_][\w.]*\(\)"  # --help, f()
    r"|(?<!\S)[:;=][-'^o]?[()\[\]DPpOo/\\|*3](?![^\s.,!?])"  # :-)
)
"""A pattern for code in backticks, fields of templates and of ICU's messages, entities, file names, options, calls and
emoticons."""

FINAL_SIGNS = ".!?…‥。！？।॥؟۔։።፡፧။។៕།෴׃"
"""Signs that end sentences."""

UNIT = (  # such as °C, %, €; km², ½, kΩ
    rf"[^\w\s{FINAL_SIGNS},;:()\[\]\"'“”«»，；：、（）「」『』《》<>=+*/|&~^−–—←-⇿-](?:(?!\d){LETTER}){{0,3}}"
    r"|[^\W\d]{1,4}[²³]|[¼-¾⅐-⅞]|[kcdmµμnMGT]?(?:m|g|l|L|s|W|V|Hz|J|Pa|B|Ω)(?:/[hls])?|min|ha?"
)
"""A pattern for units after a number, and for fractions such as ½."""
NARROW_SPACE = r"[ \u00a0\u2009\u202f]"
DIGITS = rf"(?>\d{{1,3}}(?:{NARROW_SPACE}\d{{3}}(?!\d))+|\d+)(?>(?:[-.,:/'’–٫٬：．T]\d+)*)"
"""A pattern for integers, decimals with either separator, thousands, and dates and times."""
WHOLE = re.compile(
    rf"(?:(?<!{LETTER})(?:[-+−±~≈≠≤≥<>√]|[№§]\s?))?[$¢-¥₠-⃀＄￠-￦]?"
    rf"{DIGITS}(?:[eE][-+]?\d+)?"
    rf"(?:\s?(?:{UNIT})(?!{LETTER})|(?:(?!\d){LETTER}){{1,3}}(?!{LETTER}))?"
    r"|(?<!\S)[-!:<>=+*/~|&^%]{2,}(?!\S)|(?<!\w)[^\W\d_][+#]{1,2}(?!\w)|\[(?:\d+|\^\w{1,40})\]"  # !=, C++, [1]
)
"""Numbers with their sign and unit, dates, times, operators and footnotes: if a part cannot be read, all is kept."""

_OTHER_DIGIT = re.compile(r"(?![0-9])\d")
_SAME_SIGNS = ("<wide>", "<narrow>", "<small>", "<vertical>", "<font>", "<noBreak>")


@lru_cache(maxsize=1 << 16)
def script(character: str) -> str:
    """The script of a letter, such as Latin or Han; empty for other characters and for letters of several scripts.

    >>> script("ж"), script("漢"), script("ｱ"), script("Ａ"), script("ʰ"), script("1")
    ('Cyrillic', 'Han', 'Kana', 'Latin', '', '')
    """
    if not character.isalpha():
        return ""
    name = unicodedata.name(character, "").removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH ")
    first = name.partition(" ")[0]
    return _NAMED.get(first, first.title())


def with_ascii_digits(text: str) -> str:
    """The text with digits of all scripts replaced by ASCII digits.

    >>> with_ascii_digits("៣.१४")
    '3.14'
    """
    return _OTHER_DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), text)


def is_spaced(character: str) -> bool:
    """Whether a character is a letter, digit or mark of a script with spaces between words."""
    is_mark = unicodedata.category(character or " ").startswith("M")
    return re.match(rf"[^{_SPACELESS}]" if is_mark else LETTER, character) is not None


def is_without_spaces(character: str) -> bool:
    """Whether a character belongs to a script without spaces between words, including full-width signs."""
    return re.match(rf"[{_SPACELESS}\uff00-\uffef]", character) is not None


def spells_words_without_spaces(character: str) -> bool:
    """Whether a character is a letter or mark of a script such as Thai, whose words have several letters but no spaces.

    Han and kana are words or syllables.
    """
    return unicodedata.category(character)[0] in "LM" and re.match(f"[{_UNSPACED_SYLLABLES}]", character) is not None


def is_inside_syllable(text: str, i: int) -> bool:
    """Whether a character is part of the same written syllable as the one before it.

    >>> [is_inside_syllable(text, 1) for text in ("ໂຮ", "ນະ", "ນົ", "ມໃ")]
    [True, True, True, False]
    """
    joins = unicodedata.category(text[i])[0] == "M" or text[i] in _VOWELS_BEHIND
    return joins or text[i - 1] in _VOWELS_BEFORE + _STACKING


def is_other_sign(character: str) -> bool:
    """Whether NFKC replaces a sign, such as ², ½, ™ or ㎏, by other characters, not only by another width or font."""
    kind, category = unicodedata.decomposition(character).partition(" ")[0], unicodedata.category(character)
    is_letter = category[0] in "LZM" and category != "Lm" and kind != "<super>"
    return kind[:1] == "<" and kind not in _SAME_SIGNS and not is_letter
