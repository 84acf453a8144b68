"""Names of languages, and the language of a text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

from transduce.errors import SettingsError
from transduce.serving.routes import Route
from transduce.serving.sentences import base_language
from transduce.serving.service import Service

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

Guess = dict[str, Any]
"""`language`: its code; `confidence`: in percent."""


def language_name(code: str) -> str:
    """The English name of a language code, or the code."""
    return _NAMES.get(base_language(code), code)


def source_languages(service: Service, target: str | None = None) -> list[str]:
    """The languages that can be translated to the target, or to any. Raises `SettingsError` if there are none."""
    goal = service.route(None, target).target
    return list(dict.fromkeys(one.source for one in service.routes() if target is None or one.target == goal))


async def choose_routes(
    service: Service, texts: Sequence[str], source: str | None, target: str
) -> tuple[list[Route], list[Guess]]:
    """The route of each text; without a source language, by the text, and with the best guess for each."""
    if source is not None:
        return [service.route(source, target)] * len(texts), []
    codes = source_languages(service, target)
    guesses = [(await detect(text, codes))[0] for text in texts]
    return [service.route(guess["language"], target) for guess in guesses], guesses


async def detect(text: str, codes: Sequence[str]) -> list[Guess]:
    """Guesses of the language of a text among `codes`, best first, with confidences in percent."""
    if len(codes) == 1:
        return [{"language": codes[0], "confidence": 100.0}]
    detector, by_language = await asyncio.to_thread(_detector, tuple(codes))
    found = await asyncio.to_thread(detector.compute_language_confidence_values, text[:_ENOUGH])
    return [{"language": by_language[one.language], "confidence": round(100 * one.value, 1)} for one in found]


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
