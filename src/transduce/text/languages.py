"""Codes and names of languages, detection of the language of a text, and properties of scripts."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from transduce.errors import SettingsError, nearest, needing

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
"""A pattern for a letter or digit, except in scripts that put no spaces between words: Han, Kana, Yi, Thai, Lao,
Tibetan, Khmer, Myanmar, Tai, Balinese and Javanese.
"""

_VOWELS_BEFORE = "เแโใไເແໂໃໄᦵᦶᦷᦺꪵꪶꪹꪻꪼ"
_VOWELS_BEHIND = "ะาำๅະາຳຽ"
"""Thai, Lao, New Tai Lue and Tai Viet vowels that are written after their consonant (`_VOWELS_BEFORE`: before it)."""
_STACKING = "\u1039\u1a60\u1b44\u17d2\ua9c0"
"""Signs of Myanmar, Tai Tham, Balinese, Khmer and Javanese that put the next consonant below the previous consonant."""

LETTER_WITHOUT_SPACES = rf"(?=\w)[{_SPACELESS}]"
"""A pattern for a letter of a script that puts no spaces between words (see `LETTER`)."""

IN_TOKEN = rf"(?:[^\s{_SPACELESS}\uff01-\uff65“”‘’«»…—]|(?<=[./?=&#@:\\_%+-])(?:{LETTER_WITHOUT_SPACES})++)"
"""A pattern for characters of a URL or of code. Letters of scripts without spaces match only after punctuation such as
/ or =. Elsewhere they begin the next word.
"""

LONG_WORD = rf"[^\s{_SPACELESS}]{{101,}}"
"""A pattern for strings that are too long to be a word (more than 100 characters), such as encoded data."""

ENTITY = re.compile(r"&(?:#\w{1,8}|[A-Za-z]\w{1,31});")
"""The pattern of HTML entities, such as &nbsp;, or &apos; in text that Moses has tokenized."""

INLINE = (
    rf"{ENTITY.pattern}|\x1b\[[\d;]{{0,20}}m"
    r"|\]\([^\s()]{1,2000}(?:\([^\s()]{0,100}\)[^\s()]{0,100})?(?:[ ]\"[^\"\n]{0,300}\")?\)"
)
"""A pattern for markup that may touch a word without being part of it: HTML entities, color codes of terminals, and the
`](target)` of a Markdown link.
"""

CODE = (
    r"`+[^`\n]+`+|\{\{[^{}\n]*\}\}|\{%[^\n]*?%\}|\{\s*[\w.]+\s*\}"  # `x`, {{ x }}, {% x %}, {x}
    r"|\{\s*\w+\s*,\s*(?:plural|select|selectordinal|number|date|time)\b(?:[^{}\n]|\{[^{}\n]*\})*\}"
    rf"|{INLINE}|(?<![\w:]):[a-z][\w+-]*:(?![\w:])"  # :smile:
    r"|(?<!\S)(?:(?:~|\.\.)/|\*?\.(?=[a-z]))[\w./*-]*\w"  # ../name, *.py
    r"|(?<!\S)--[a-z][a-z\d]*(?:-[a-z\d]+)*(?:=\S*\w)?(?![\w-])|(?<!\w)[A-Za-z_][\w.]*\(\)"  # --help, f()
    r"|(?<!\S)[:;=][-'^o]?[()\[\]DPpOo/\\|*3](?![^\s.,!?])"  # :-)
)
"""A pattern for code in backticks, fields of templates and ICU messages, HTML entities, file names, options, function
calls and emoticons."""

FINAL_SIGNS = ".!?…‥。！？।॥؟۔։።፡፧။។៕།෴׃"
"""Punctuation marks that end sentences."""

UNIT = (  # such as °C, %, €; km², ½, kΩ
    rf"[^\w\s{FINAL_SIGNS},;:()\[\]\"'“”«»，；：、（）「」『』《》<>=+*/|&~^−–—←-⇿-](?:(?!\d){LETTER}){{0,3}}"
    r"|[^\W\d]{1,4}[²³]|[¼-¾⅐-⅞]|[kcdmµμnMGT]?(?:m|g|l|L|s|W|V|Hz|J|Pa|B|Ω)(?:/[hls])?|min|ha?"
)
"""A pattern for units after a number, and for fractions such as ½."""
NARROW_SPACE = r"[ \u00a0\u2009\u202f]"
DIGITS = rf"(?>\d{{1,3}}(?:{NARROW_SPACE}\d{{3}}(?!\d))+|\d+)(?>(?:[-.,:/'’–٫٬：．T]\d+)*)"
"""A pattern for integers, decimals and numbers with any separators, dates and times."""
WHOLE = re.compile(
    rf"(?:(?<!{LETTER})(?:[-+−±~≈≠≤≥<>√]|[№§]\s?))?[$¢-¥₠-⃀＄￠-￦]?"
    rf"{DIGITS}(?:[eE][-+]?\d+)?"
    rf"(?:\s?(?:{UNIT})(?!{LETTER})|(?:(?!\d){LETTER}){{1,3}}(?!{LETTER}))?"
    r"|(?<!\S)[-!:<>=+*/~|&^%]{2,}(?!\S)|(?<!\w)[^\W\d_][+#]{1,2}(?!\w)|\[(?:\d+|\^\w{1,40})\]"  # !=, C++, [1]
)
"""Numbers with sign and unit, dates, times, operators and footnotes. A match with an unreadable part is kept whole."""

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
    """Whether a character is a letter, digit or diacritic of a script with spaces between words."""
    is_mark = unicodedata.category(character or " ").startswith("M")
    return re.match(rf"[^{_SPACELESS}]" if is_mark else LETTER, character) is not None


def is_without_spaces(character: str) -> bool:
    """Whether a character belongs to a script without spaces between words, or is a full-width form."""
    return re.match(rf"[{_SPACELESS}\uff00-\uffef]", character) is not None


def spells_words_without_spaces(character: str) -> bool:
    """Whether a character is a letter or mark of a script such as Thai, whose words have several letters but no spaces.

    Han and kana characters, which are words or syllables themselves, are excluded.
    """
    return unicodedata.category(character)[0] in "LM" and re.match(f"[{_UNSPACED_SYLLABLES}]", character) is not None


def is_inside_syllable(text: str, i: int) -> bool:
    """Whether character `i` belongs to the same written syllable as the character before it.

    >>> [is_inside_syllable(text, 1) for text in ("ໂຮ", "ນະ", "ນົ", "ມໃ")]
    [True, True, True, False]
    """
    joins = unicodedata.category(text[i])[0] == "M" or text[i] in _VOWELS_BEHIND
    return joins or text[i - 1] in _VOWELS_BEFORE + _STACKING


def is_other_sign(character: str) -> bool:
    """Whether NFKC changes a symbol, such as ², ½, ™ or ㎏, to other characters, and not only its width or font."""
    kind, category = unicodedata.decomposition(character).partition(" ")[0], unicodedata.category(character)
    is_letter = category[0] in "LZM" and category != "Lm" and kind != "<super>"
    return kind[:1] == "<" and kind not in _SAME_SIGNS and not is_letter


Languages = tuple[str | None, str | None]
"""Codes of the source language and the target language, or None if unset."""

_NAMES = {
    "ar": "Arabic", "bg": "Bulgarian", "bn": "Bengali", "ca": "Catalan", "cs": "Czech", "da": "Danish", "de": "German",
    "el": "Greek", "en": "English", "eo": "Esperanto", "es": "Spanish", "et": "Estonian", "eu": "Basque",
    "fa": "Persian",
    "fi": "Finnish", "fr": "French", "ga": "Irish", "gl": "Galician", "he": "Hebrew", "hi": "Hindi", "hr": "Croatian",
    "hu": "Hungarian", "id": "Indonesian", "is": "Icelandic", "it": "Italian", "ja": "Japanese", "ko": "Korean",
    "lt": "Lithuanian", "lv": "Latvian", "ms": "Malay", "nb": "Norwegian", "nl": "Dutch",
    "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sk": "Slovak", "sl": "Slovenian",
    "sq": "Albanian", "sr": "Serbian", "sv": "Swedish", "sw": "Swahili", "ta": "Tamil", "th": "Thai", "tl": "Tagalog",
    "tr": "Turkish", "uk": "Ukrainian", "ur": "Urdu", "vi": "Vietnamese", "zh": "Chinese",
}  # fmt: skip
# The usual code of each language (ISO 639-1), then its other codes, separated by slashes (ISO 639-3, ISO 639-2/B, ...)
_ISO = """
aa aar, ab abk, ae ave, af afr, ak aka, am amh, an arg, ar ara/arb, as asm, av ava, ay aym/ayr, az aze/azj, ba bak,
be bel, bg bul, bi bis, bm bam, bn ben, bo bod/tib, br bre, bs bos, ca cat, ce che, ch cha, co cos, cr cre,
cs ces/cze, cu chu, cv chv, cy cym/wel, da dan, de deu/ger, dv div, dz dzo, ee ewe, el ell/gre, en eng, eo epo, es spa,
et est/ekk, eu eus/baq, fa fas/pes/per, ff ful/fuv, fi fin, fj fij, fo fao, fr fra/fre, fy fry, ga gle, gd gla, gl glg,
gn grn, gu guj, gv glv, ha hau, he heb/iw, hi hin, hr hrv, ht hat, hu hun, hy hye/arm, hz her, ia ina, id ind/in,
ie ile, ig ibo, ii iii, ik ipk, io ido, is isl/ice, it ita, iu iku, ja jpn, jv jav/jw, ka kat/geo, kg kon, ki kik,
kj kua, kk kaz, kl kal, km khm, kn kan, ko kor, kr kau, ks kas, ku kur/kmr, kv kom, kw cor, ky kir, la lat, lb ltz,
lg lug, li lim, ln lin, lo lao, lt lit, lu lub, lv lav/lvs, mg mlg/plt, mh mah, mi mri/mao, mk mkd/mac, ml mal,
mn mon/khk, mr mar, ms msa/zsm/may, mt mlt, my mya/bur, na nau, nb nob/no/nor, nd nde, ne nep/npi, ng ndo, nl nld/dut,
nn nno, nso ns, nr nbl, nv nav, ny nya, oc oci, oj oji, om orm/gaz, or ori/ory, os oss, pa pan, pi pli, pl pol,
ps pus/pbt, pt por, qu que/quy, rm roh, rn run, ro ron/rum/mo, ru rus, rw kin, sa san, sc srd, sd snd, se sme, sg sag,
si sin, sk slk/slo, sl slv, sm smo, sn sna, so som, sq sqi/als/alb, sr srp, ss ssw, st sot, su sun, sv swe,
sw swa/swh, ta tam, te tel, tg tgk, th tha, ti tir, tk tuk, tl tgl/fil, tn tsn, to ton, tr tur, ts tso, tt tat, tw twi,
ty tah, ug uig, uk ukr, ur urd, uz uzb/uzn, ve ven, vi vie, vo vol, wa wln, wo wol, xh xho, yi yid/ydd/ji, yo yor,
za zha, zh zho/cmn/chi, zu zul
"""
_SHORTEST = {
    other: short
    for short, others in (pair.split() for pair in _ISO.replace("\n", " ").split(","))
    for other in others.split("/")
}
_VARIANTS = {"pb": "pt-br", "zh-cn": "zh-hans", "zh-hk": "zh-hant", "zh-tw": "zh-hant", "zt": "zh-hant"}
"""Usual codes for LibreTranslate's own codes and for regions of Chinese, which imply a script."""
_ENOUGH = 1000
"""Maximum characters of a text that are read to guess its language."""
_SHORT = 20
"""In a text of this many letters, an expected language has twice the weight of others; in a shorter text, more."""
_ALONE = 0.2
"""Constant added to a language's share of the other texts, so that one text can be in a different language."""
_BY_SCRIPT = {
    "Khmer": "km", "Lao": "lo", "Sinhala": "si", "Myanmar": "my", "Ethiopic": "am ti", "Kannada": "kn",
    "Malayalam": "ml", "Oriya": "or", "Tibetan": "bo dz", "Thaana": "dv",
}  # fmt: skip
"""Scripts of which lingua knows no language, each with its languages, the most frequent first."""
_NO_LANGUAGE = re.compile(r"<[^<>]*>|https?://\S+|(?<!\S)\S+@\S+")
"""Tags, URLs and e-mail addresses, whose words do not show the language of a text."""


def normalize_code(code: str) -> str:
    """Return the usual form of a language code, in lower case: the shortest code of the language, plus its variant.

    >>> [normalize_code(code) for code in ("EN", "pt_BR", "pb", "no", "iw_IL", "deu_Latn")]
    ['en', 'pt-br', 'pt-br', 'nb', 'he-il', 'de-latn']
    """
    language, hyphen, variant = code.replace("_", "-").lower().partition("-")
    code = _SHORTEST.get(language, language) + hyphen + variant
    return _VARIANTS.get(code, code)


def base_language(code: str) -> str:
    """Return the usual code of a language, without region or script: "de" for de-AT or deu_Latn, "he" for iw."""
    return normalize_code(code).partition("-")[0]


def is_language(code: str) -> bool:
    """Whether a code, without its region or script, names a language of ISO 639-1, in any of its notations."""
    return base_language(code) in _SHORTEST.values()


def are_different(one: str | None, other: str | None) -> bool:
    return bool(one and other) and base_language(one or "") != base_language(other or "")


def language_name(code: str) -> str:
    return _NAMES.get(base_language(code), code)


_SCRIPTS = {"zh": "hans", "ar": "arab", "sr": "cyrl", "ks": "arab", "yue": "hant"}
"""The usual scripts of languages that models may have in several scripts. Other languages default to Latin."""
_SHOWN = 20
"""Maximum number of language codes that an error lists."""
_LONGEST = 40
"""Maximum length of a language code; the rest is ignored."""


class _Code(NamedTuple):
    language: str
    script: str
    region: str


@lru_cache(maxsize=1024)
def _parts_of(code: str) -> _Code:
    """The parts of a code such as fr, fra_Latn, fr-CA, zh-Hant or en_XX, in lower case; a missing part is empty."""
    first, *others = re.split(r"[-_]+", code.strip("_<>").lower())
    language = base_language(first)
    script = next((part for part in others if len(part) == 4 and part.isalpha()), "")
    region = next((part for part in others if len(part) in (2, 3) and part != "xx"), "")
    if language == "zh" and not script:
        script = "hant" if region in ("tw", "hk", "mo") else "hans" if region else ""
    return _Code(language, script, region)


def match_language(code: str, known: Iterable[str]) -> str | None:
    """Return the known code with the language of `code` and, if it names a script, that script; None if there is none.

    >>> known = ("eng_Latn", "fra_Latn", "zho_Hans", "zho_Hant")
    >>> [match_language(code, known) for code in ("en", "fr-CA", "fra", "zh", "zh-TW", "zh-Hant")]
    ['eng_Latn', 'fra_Latn', 'fra_Latn', 'zho_Hans', 'zho_Hant', 'zho_Hant']
    """
    wanted = _parts_of(code[:_LONGEST])
    usual = wanted.script or _SCRIPTS.get(wanted.language, "latn")

    def order(other: str) -> tuple[bool, bool, bool]:
        """Sort key of matching codes. The best code has the usual script or none, and the wanted region or none."""
        its = _parts_of(other)
        return its.script not in (usual, ""), its.region != wanted.region, its.region != ""

    def fits(other: str) -> bool:
        its = _parts_of(other)
        return its.language == wanted.language and (not wanted.script or its.script in (wanted.script, ""))

    return min(filter(fits, known), key=order, default=None)


def find_language(code: str, known: Collection[str], *, name: str) -> str:
    """Return the known code that matches `code`, or raise a `SettingsError` about the setting `name`."""
    match = code if code in known else match_language(code, known)
    if match is not None:
        return match
    related = [other for other in known if not are_different(code, other)]
    hint = f"; did you mean '{related[0]}'?" if related else nearest(code, known)
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    listed = f"{', '.join(sorted(known)[:_SHOWN])}{more}"
    raise SettingsError(f"{name} = '{code}': the model has no such language{hint}; it has {listed}", f"data.{name}")


def is_detectable(code: str) -> bool:
    """Whether `guess_languages` knows the language of a code. Raises `SettingsError` if lingua is not installed."""
    language = base_language(code)
    return hasattr(_lingua().IsoCode639_1, language.upper()) or language in " ".join(_BY_SCRIPT.values()).split()


def guess_languages(texts: Sequence[str], expected: Mapping[str, float]) -> list[dict[str, float]]:
    """Return the probability of each language of each text, the highest first; empty for a text such as 123.

    Recognizes all languages of lingua, and others by their script. A language is more probable if the other texts are
    in it. `expected`: codes of languages to prefer in short texts, with weights from 0 to 1. Raises `SettingsError` if
    lingua is not installed.
    """
    iso = _lingua().IsoCode639_1
    # If two codes name one language, the first counts.
    names = {code: base_language(code).upper() for code in reversed([*expected])}
    codes = {getattr(iso, name): code for code, name in names.items() if hasattr(iso, name)}
    words = [_NO_LANGUAGE.sub(" ", text)[:_ENOUGH] for text in texts]
    guesses = [_guess_by_script(text, expected) or _guess(text, codes, expected) for text in words]
    sizes = [len(text) if guess else 0 for text, guess in zip(texts, guesses, strict=True)]
    characters = Counter[str]()  # number of characters in each language
    for size, guess in zip(sizes, guesses, strict=True):
        characters.update({code: size * p for code, p in guess.items()})

    def agreed(size: int, guess: Mapping[str, float]) -> dict[str, float]:
        others = max(sum(sizes) - size, 1)
        shares = {code: (characters[code] - size * p) / others for code, p in guess.items()}
        return _probabilities({code: p * (_ALONE + shares[code]) for code, p in guess.items()})

    return list(map(agreed, sizes, guesses))


def _guess_by_script(text: str, expected: Mapping[str, float]) -> dict[str, float]:
    """Guess the language from the script of most letters, if lingua knows no language of it. Otherwise, return {}."""
    letters = Counter(filter(None, map(script, text)))
    languages = _BY_SCRIPT.get(max(letters, key=letters.__getitem__, default=""), "").split()
    codes = [code for code in expected if base_language(code) in languages] + languages
    return {codes[0]: 1.0} if codes else {}


def _guess(text: str, codes: Mapping[Any, str], expected: Mapping[str, float]) -> dict[str, float]:
    """Guess the languages of one text. `codes`: our codes, by lingua's codes.

    lingua's exact models of all languages would take 0.9 GB and 6 seconds, so its small models propose three languages.
    """
    build = _lingua().LanguageDetectorBuilder
    values = build.from_all_languages().with_low_accuracy_mode().build().compute_language_confidence_values(text)
    languages = {guess.language.iso_code_639_1 for guess in values[:3] if guess.value} | codes.keys()
    if len(languages) > 1:
        values = build.from_iso_codes_639_1(*languages).build().compute_language_confidence_values(text)
    preference = (_SHORT / max(sum(map(str.isalpha, text)), 1)) ** 2
    weights = {}
    for guess in values:
        language = guess.language.iso_code_639_1
        code = codes.get(language) or language.name.lower()
        weights[code] = guess.value * (1 + expected.get(code, 0.0) * preference)
    return _probabilities(weights)


def _probabilities(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {code: weight / total for code, weight in Counter(weights).most_common() if weight}


def _lingua() -> Any:
    with needing("serve", "source 'auto' needs lingua-language-detector (or name the source language)"):
        import lingua
    return lingua
