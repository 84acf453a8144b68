"""Texts of any length and language: split into sentences, translated together, and put together again."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from transduce.config.decoding import DecodingOptions
from transduce.decoding.alignment import Link
from transduce.decoding.results import TextLogProbs, Translation
from transduce.serving.concurrency import expiring, offload
from transduce.serving.routes import Route
from transduce.serving.service import Service
from transduce.text.languages import base_language, guess_language
from transduce.text.special import Span

_DEFAULT = DecodingOptions()

LONGEST = 1000
"""Characters of a sentence; a longer one is cut, at a comma or a space where there is one."""

SHORTEST = 10
"""Characters of a short sentence, for an estimate of the number of sentences."""

Guess = dict[str, Any]
"""`language`: its code; `confidence`: in percent."""

_WITHOUT_SPACES = ("zh", "ja", "th", "lo", "km", "my")
_LINE = re.compile(r"[^\r\n\v\f\x1c-\x1e\x85\u2028\u2029]+")
_WIDE_SPACE = re.compile(r"[^\S ]")  # sentencex takes all spaces for one byte, and fails
_CUT = re.compile(r"(?<=[,;:，；、])\s*|\s+")


def split_sentences(text: str, language: str) -> list[str]:
    """Parts that give `text` when joined: sentences at even places, what is between them (white space) at odd ones.

    The first sentence is empty if the text begins with white space. A sentence never contains a line end.
    """
    parts, end = list[str](), 0
    for start, stop in _sentence_spans(text, language):
        parts += [text[end:start], text[start:stop]]
        end = stop
    parts.append(text[end:])
    parts = ["", *parts] if parts[0] else parts[1:]
    if parts and not parts[-1]:
        del parts[-1]
    return parts or [""]


def joined_parts(sentences: Sequence[str], parts: Sequence[str], source: str, target: str) -> list[str]:
    """`parts` of `split_sentences` with other sentences: line breaks stay, and spaces become those of the language."""
    if len(parts) == 1:
        return list(sentences)
    space = "" if base_language(target) in _WITHOUT_SPACES else " "
    same_spaces = (base_language(source) in _WITHOUT_SPACES) == (not space)
    joined = [sentences[0]]
    for between, sentence in zip(parts[1::2], [*sentences[1:], ""], strict=False):
        breaks_line = bool(between) and not _LINE.fullmatch(between)
        keep = breaks_line or same_spaces or not (joined[-1] and sentence)
        joined += [between if keep else space, sentence]
    return joined


def _sentence_spans(text: str, language: str) -> Iterator[Span]:
    import sentencex  # an optional package

    code = base_language(language)
    for line in _LINE.finditer(text):
        place = line.start()
        for sentence in sentencex.segment(code, _WIDE_SPACE.sub(" ", line[0])):
            for piece in _cut(text[place : place + len(sentence)]):
                if core := piece.strip():
                    start = text.index(core, place)
                    yield start, start + len(core)
                place += len(piece)


def _cut(sentence: str) -> Iterator[str]:
    while len(sentence) > LONGEST:
        ends = [found.end() for found in _CUT.finditer(sentence, LONGEST // 2, LONGEST)]
        end = ends[-1] if ends else LONGEST
        yield sentence[:end]
        sentence = sentence[end:]
    yield sentence


@dataclass(frozen=True, slots=True)
class TextTranslation:
    """The translation of a text.

    parts: the text as `split_sentences` cuts it. sentences: the translations of its sentences. links: of the words of
    each sentence; scores: of the tokens of its best translation; both where they were asked for.
    """

    parts: tuple[str, ...]
    route: Route
    sentences: tuple[Translation, ...]
    links: tuple[list[Link], ...] = ()
    scores: tuple[TextLogProbs, ...] = ()

    @property
    def text(self) -> str:
        return self.alternative(0)

    def alternative(self, place: int) -> str:
        """The text of the candidates at this place of each sentence, the last where there are fewer."""
        best = [one.candidates[min(place, len(one.candidates) - 1)].text for one in self.sentences]
        return "".join(joined_parts(best, self.parts, *self.route.languages))

    def alternatives(self, n: int) -> list[str]:
        """Up to `n` other translations, best first, each once."""
        found = dict.fromkeys(self.alternative(place) for place in range(n + 1))
        return list(found)[1:]


async def translate_texts(
    service: Service,
    texts: Sequence[str],
    routes: Sequence[Route],
    options: DecodingOptions = _DEFAULT,
    *,
    end: float | None = None,
    split: bool = True,
    prefixes: Sequence[str] = (),
    align: Collection[int] = (),
    scores: bool = False,
) -> list[TextTranslation]:
    """Translate texts; a translation depends on its own text only.

    Args:
        service: What translates sentences.
        texts: The texts; line breaks and blank lines stay.
        routes: The languages of each text.
        options: How to translate sentences.
        end: When the work is given up: see `Service.deadline`.
        split: False: each text is one sentence.
        prefixes: What the translation of each text starts with, if there are any.
        align: Places of the texts whose words are aligned with those of their translations.
        scores: Find the log-probability of each token of the translations.
    """
    end = service.deadline() if end is None else end

    def in_sentences() -> list[list[str]]:
        pairs = zip(texts, routes, strict=True)
        return [split_sentences(text, route.source) if split else [text] for text, route in pairs]

    cut = await offload(sum(map(len, texts)) // SHORTEST, in_sentences)
    starts = list(prefixes) or [""] * len(texts)
    results: dict[int, TextTranslation] = {}
    groups: dict[str, list[int]] = {}
    for place, route in enumerate(routes):
        groups.setdefault(route.name, []).append(place)
    for places in groups.values():
        route = routes[places[0]]
        found = await service.translate(
            [sentence for place in places for sentence in cut[place][::2]],
            route,
            options,
            end=end,
            prefixes=[start for place in places for start in _prefixes(cut[place][::2], starts[place])],
            refuse=not results,
        )
        sentences = iter(found.sentences)
        wanted = [place in align for place in places for _ in cut[place][::2]]
        links = iter(await found.align(end, wanted) if align else [])
        token_scores = iter(await found.score(end) if scores else [])
        for place in places:
            n = len(cut[place][::2])
            results[place] = TextTranslation(
                parts=tuple(cut[place]),
                route=route,
                sentences=tuple(islice(sentences, n)),
                links=tuple(islice(links, n)),
                scores=tuple(islice(token_scores, n)),
            )
    return [results[place] for place in range(len(texts))]


def _prefixes(sentences: Sequence[str], start: str) -> list[str]:
    """The prefix of each sentence: the first that is not empty has the text's, which may begin with white space."""
    first = next((place for place, sentence in enumerate(sentences) if sentence), 0)
    return [start if place == first else "" for place in range(len(sentences))]


def source_languages(service: Service, target: str | None = None) -> list[str]:
    """The languages that can be translated to the target, or to any. Raises `SettingsError` if there are none."""
    goal = service.route(None, target).target
    return list(dict.fromkeys(one.source for one in service.routes if target is None or one.target == goal))


async def choose_routes(
    service: Service, texts: Sequence[str], source: str | None, target: str, *, end: float
) -> tuple[list[Route], list[Guess]]:
    """The route of each text; without a source language, by the text, and with the best guess for each.

    Raises `ExpiredError` at `end`, a time of the event loop.
    """
    if source:
        return [service.route(source, target)] * len(texts), []
    codes = source_languages(service, target)
    guesses = list[Guess]()
    async with expiring(end):
        for text in texts:
            guesses.append((await detect(text, codes))[0])
    return [service.route(guess["language"], target) for guess in guesses], guesses


async def detect(text: str, codes: Sequence[str]) -> list[Guess]:
    """Guesses of the language of a text among `codes`, best first, with confidences in percent."""
    guesses = await asyncio.to_thread(guess_language, text, codes)
    return [{"language": code, "confidence": round(100 * probability, 1)} for code, probability in guesses]
