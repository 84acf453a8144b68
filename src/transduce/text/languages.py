"""Language codes: the language of a code, its English name, and the language of a text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from transduce.errors import SettingsError

_NAMES = {
    "ar": "Arabic", "bg": "Bulgarian", "bn": "Bengali", "ca": "Catalan", "cs": "Czech", "da": "Danish", "de": "German",
    "el": "Greek", "en": "English", "eo": "Esperanto", "es": "Spanish", "et": "Estonian", "eu": "Basque",
    "fa": "Persian",
    "fi": "Finnish", "fr": "French", "ga": "Irish", "gl": "Galician", "he": "Hebrew", "hi": "Hindi", "hr": "Croatian",
    "hu": "Hungarian", "id": "Indonesian", "is": "Icelandic", "it": "Italian", "ja": "Japanese", "ko": "Korean",
    "lt": "Lithuanian", "lv": "Latvian", "ms": "Malay", "nb": "Norwegian", "nl": "Dutch", "no": "Norwegian",
    "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sk": "Slovak", "sl": "Slovenian",
    "sq": "Albanian", "sr": "Serbian", "sv": "Swedish", "sw": "Swahili", "ta": "Tamil", "th": "Thai", "tl": "Tagalog",
    "tr": "Turkish", "uk": "Ukrainian", "ur": "Urdu", "vi": "Vietnamese", "zh": "Chinese",
}  # fmt: skip
_ENOUGH = 1000
"""Characters from which a language is guessed."""


def base_language(code: str) -> str:
    """The language of a code such as de-AT or zh_Hans."""
    return code.replace("_", "-").partition("-")[0].lower()


def language_name(code: str) -> str:
    """The English name of a language code, or the code."""
    return _NAMES.get(base_language(code), code)


def guess_language(text: str, codes: Sequence[str]) -> list[tuple[str, float]]:
    """The probability of each of these languages, the most probable first.

    Raises `SettingsError` where lingua is not installed, or does not know or distinguish the languages.
    """
    if len(codes) == 1:
        return [(codes[0], 1.0)]
    detector, by_language = _detector(tuple(codes))
    found = detector.compute_language_confidence_values(text[:_ENOUGH])
    return [(by_language[one.language], one.value) for one in found]


@cache
def _detector(codes: tuple[str, ...]) -> tuple[Any, dict[Any, str]]:
    """A detector of these languages only, loaded when it is first needed."""
    try:
        from lingua import IsoCode639_1, Language, LanguageDetectorBuilder
    except ImportError:
        raise SettingsError(
            "source 'auto' needs lingua-language-detector; name the source language, or install 'transduce[serve]'"
        ) from None
    known: dict[Any, str] = {}
    for code in codes:
        iso = getattr(IsoCode639_1, base_language(code).upper(), None)
        if iso is None:
            raise SettingsError(f"the language '{code}' cannot be detected; name the source language")
        known.setdefault(Language.from_iso_code_639_1(iso), code)
    if len(known) == 1:
        raise SettingsError(f"the languages {', '.join(codes)} cannot be distinguished; name the source language")
    return LanguageDetectorBuilder.from_languages(*known).build(), known
