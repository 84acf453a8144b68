"""The route of a text whose source language is not given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from transduce.serving.routes import Route
from transduce.serving.service import Service
from transduce.text.languages import guess_language

Guess = dict[str, Any]
"""`language`: its code; `confidence`: in percent."""


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
    guesses = await asyncio.to_thread(guess_language, text, codes)
    return [{"language": code, "confidence": round(100 * probability, 1)} for code, probability in guesses]
