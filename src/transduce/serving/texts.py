"""Texts of any length: split into sentences, translated together, and put together again."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from transduce.decoding.alignment import Link
from transduce.decoding.options import TranslationOptions
from transduce.decoding.results import Score, Translation
from transduce.serving.concurrency import offload
from transduce.serving.routes import Route
from transduce.serving.sentences import join_sentences, split_sentences
from transduce.serving.service import Service

_DEFAULT = TranslationOptions()


SHORTEST = 10
"""Characters of a short sentence, for an estimate of the number of sentences."""

Extra = Literal["alignment", "scores"]
"""What can be found about translations: which words translate which, and the log-probability of each token."""


@dataclass(frozen=True, slots=True)
class TextTranslation:
    """The translation of a text.

    parts: the text as `split_sentences` cuts it. sentences: the translations of its sentences. links: of the words of
    each sentence; scores: of the tokens of its best translation; both where they were asked for.
    """

    parts: tuple[str, ...]
    sentences: tuple[Translation, ...]
    route: Route
    links: tuple[list[Link], ...] = ()
    scores: tuple[Score, ...] = ()

    @property
    def text(self) -> str:
        """The best translation."""
        return self.alternative(0)

    def alternative(self, place: int) -> str:
        """The text of the candidates at this place of each sentence, the last where there are fewer."""
        best = [one.candidates[min(place, len(one.candidates) - 1)].text for one in self.sentences]
        return join_sentences(best, self.parts, self.route.source, self.route.target)

    def alternatives(self, n: int) -> list[str]:
        """Up to `n` other translations, best first, each once."""
        found = dict.fromkeys(self.alternative(place) for place in range(n + 1))
        return list(found)[1:]


async def translate_texts(
    service: Service,
    texts: Sequence[str],
    routes: Sequence[Route],
    options: TranslationOptions = _DEFAULT,
    *,
    seconds: float | None = None,
    split: bool = True,
    prefixes: Sequence[str] = (),
    extras: Collection[Extra] = (),
) -> list[TextTranslation]:
    """Translate texts; a translation depends on its own text only.

    Args:
        service: What translates sentences.
        texts: The texts; line breaks and blank lines stay.
        routes: The languages of each text.
        options: How to translate sentences.
        seconds: See `Service.deadline`.
        split: False: each text is one sentence.
        prefixes: What the translation of each text starts with, if there are any.
        extras: What else to find.
    """
    deadline = service.deadline(seconds)

    def in_sentences() -> list[list[str]]:
        pairs = zip(texts, routes, strict=True)
        return [split_sentences(text, route.source) if split else [text] for text, route in pairs]

    cut = await offload(sum(map(len, texts)) // SHORTEST, in_sentences)
    starts = list(prefixes) or [""] * len(texts)
    results: list[TextTranslation | None] = [None] * len(texts)

    async def translate(route: Route, places: Sequence[int]) -> None:
        """The texts at these places, which have the same languages."""
        found = await service.translate(
            [sentence for place in places for sentence in cut[place][::2]],
            route,
            options,
            end=deadline,
            prefixes=[start for place in places for start in _prefixes(cut[place][::2], starts[place])],
        )
        sentences = iter(found.sentences)
        links = iter(await found.align(deadline) if "alignment" in extras else [])
        scores = iter(await found.score(deadline) if "scores" in extras else [])
        for place in places:
            n = len(cut[place][::2])
            results[place] = TextTranslation(
                tuple(cut[place]), tuple(islice(sentences, n)), route, tuple(islice(links, n)), tuple(islice(scores, n))
            )

    groups: dict[str, list[int]] = {}
    for place, route in enumerate(routes):
        groups.setdefault(route.name, []).append(place)
    await together([translate(routes[places[0]], places) for places in groups.values()])
    return [one for one in results if one is not None]


def _prefixes(sentences: Sequence[str], start: str) -> list[str]:
    """The prefix of each sentence: the first that is not empty has the text's, which may begin with white space."""
    first = next((place for place, sentence in enumerate(sentences) if sentence), 0)
    return [start if place == first else "" for place in range(len(sentences))]


async def together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Do works at the same time. When one fails, the others are cancelled; its error is raised when they have ended."""
    if len(works) == 1:
        await works[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
