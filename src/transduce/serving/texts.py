"""Translate texts of any length, format and language: split into sentences, translated together, and rejoined."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, compress, islice, pairwise
from typing import Any, NamedTuple

from transduce.config.decoding import DecodingOptions
from transduce.decoding.alignment import Link
from transduce.decoding.prefix import prefixes_of
from transduce.decoding.queue import expiring
from transduce.decoding.results import Candidate, TextLogProbs, Translation, distinct, joined_note
from transduce.errors import SettingsError
from transduce.serving.async_models import offload
from transduce.serving.service import Route, Service
from transduce.serving.tags.markup import MarkupRules, Segment, parse_markup
from transduce.serving.tags.protected import DEFAULT_KINDS, Kind, find_kinds, find_terms
from transduce.serving.tags.transfer import Element, Word, project, words_of
from transduce.text.languages import guess_languages, is_detectable
from transduce.text.sentences import joined_parts

_DEFAULT = DecodingOptions()

SHORTEST = 10
"""Characters of a short sentence, to estimate the maximum number of sentences in a text."""

Guess = dict[str, Any]
"""A detected language. `language`: its code. `confidence`: in percent, an integer."""


@dataclass(frozen=True, slots=True)
class TextTranslation:
    """The translation of a text.

    parts: The result of `Route.split`. sentences: Translations of the sentences. links: Word links of each sentence.
    scores: Log-probabilities of the tokens of each best translation. Both are empty unless requested.
    """

    parts: Sequence[str]
    route: Route
    sentences: Sequence[Translation]
    links: Sequence[list[Link]] = ()
    scores: Sequence[TextLogProbs] = ()

    @property
    def text(self) -> str:
        return Translation.join(self.parts, self.sentences).text

    @property
    def candidates(self) -> list[Candidate]:
        """Distinct translations of the whole text, the best first."""
        return distinct(Translation.join(self.parts, self.sentences).candidates)

    @property
    def note(self) -> dict[str, str]:
        return join_notes(self.sentences)


def join_notes(sentences: Iterable[Translation]) -> dict[str, str]:
    """Make a response field `note` of the notes on sentences, such as a cut-off output; empty without notes."""
    note = joined_note(sentences)
    return {"note": note} if note else {}


async def translate_texts(
    service: Service,
    texts: Sequence[str],
    routes: Sequence[Route],
    options: DecodingOptions = _DEFAULT,
    *,
    end: float | None = None,
    prefixes: Sequence[str] = (),
    align: Collection[int] = (),
    scores: bool = False,
) -> list[TextTranslation]:
    """Translate texts. Each translation depends only on its own text.

    Args:
        service: The service that translates sentences.
        texts: The texts. Line breaks and blank lines stay.
        routes: The route of each text.
        options: Decoding options.
        end: Time of the event loop at which the work is cancelled. See `Service.deadline`.
        prefixes: The beginning of each translation, if any.
        align: Indices of the texts whose words are aligned with their translations.
        scores: Compute the log-probability of each token of the translations.
    """
    end = service.deadline() if end is None else end

    def split() -> list[list[str]]:
        return [route.split(text, options) for text, route in zip(texts, routes, strict=True)]

    parts = await offload(sum(map(len, texts)) // SHORTEST, split)
    starts = list(prefixes) or [""] * len(texts)
    results: dict[int, TextTranslation] = {}
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, route in enumerate(routes):
        groups.setdefault((route.name, *route.languages), []).append(number)
    for numbers in groups.values():
        translated = await service.translate(
            [sentence for number in numbers for sentence in parts[number][::2]],
            routes[numbers[0]],
            options,
            end=end,
            prefixes=[start for number in numbers for start in prefixes_of(parts[number], starts[number])],
            refuse=not results,
        )
        wanted = [number in align for number in numbers for _ in parts[number][::2]]
        sentences = iter(translated.sentences)
        links = iter(await translated.align(end, wanted) if align else [])
        token_scores = iter(await translated.score(end) if scores else [])
        for number in numbers:
            n = len(parts[number][::2])
            results[number] = TextTranslation(
                parts[number],
                translated.route,
                list(islice(sentences, n)),
                list(islice(links, n)),
                list(islice(token_scores, n)),
            )
    return [results[number] for number in range(len(texts))]


async def choose_routes(
    service: Service, texts: Sequence[str], source: str | None, target: str, *, end: float
) -> tuple[list[Route | None], list[Guess]]:
    """Choose the route of each text, and return its source language, detected if `source` is None or "auto".

    A route is None if the text is not translated, because it is in the target language, in an unsupported language, or
    in no language, such as 123. Raises `ExpiredError` at `end`, a time of the event loop.
    """
    if source and source != "auto":
        route = service.route(source, target)
        return [route] * len(texts), [{"language": route.source, "confidence": 100}] * len(texts)
    goal = service.route(None, target).target
    known = {route.source: service.route(route.source, target) for route in service.routes if route.target == goal}
    if not any(map(is_detectable, known)):
        if len(known) > 1:
            raise SettingsError(f"{', '.join(known)}: these languages cannot be detected; name the source language")
        return [*known.values()] * len(texts), [{"language": code, "confidence": 0} for code in known] * len(texts)
    guesses = [best for best, *_ in await detect(texts, {**dict.fromkeys(known, 1.0), goal: 0.5}, end=end)]
    return [known.get(best["language"]) if best["confidence"] else None for best in guesses], guesses


async def detect(texts: Sequence[str], expected: Mapping[str, float], *, end: float) -> list[list[Guess]]:
    """Detect the possible languages of each text, the best first. `expected`: see `guess_languages`.

    A text in no language gets the most frequent language of the other texts, with confidence 0.
    """
    async with expiring(end):
        probabilities = await asyncio.to_thread(guess_languages, texts, expected)
    best = [next(iter(guess)) for guess in probabilities if guess]
    usual = max(best, key=best.count, default=max(expected, key=expected.__getitem__))
    return [
        [{"language": code, "confidence": round(100 * p)} for code, p in guess.items() if p >= 0.005]
        or [{"language": usual, "confidence": 0}]
        for guess in probabilities
    ]


@dataclass(frozen=True, slots=True)
class TextFormat:
    """The format of texts, and the parts to preserve.

    rules: Rules for tags, or None for plain text. protect: Kinds of preserved parts. terms: A glossary's terms, each
    with its translation.
    """

    rules: MarkupRules | None = None
    protect: Collection[Kind] = DEFAULT_KINDS
    terms: Mapping[str, str] = field(default_factory=dict)

    def parse(self, text: str, *, hide: bool) -> list[str | Segment]:
        """Split a text into segments to translate and the markup between them, in order.

        `hide`: replace preserved parts, see `Element.hide_leaves`.
        """
        parts: list[str | Segment] = [Segment(text, Element(0, len(text)))]
        if self.rules is not None:
            parts = parse_markup(text, self.rules)
        for part in parts:
            if isinstance(part, Segment):
                part.root.keep(find_terms(part.text, self.terms), self.escape)
                part.root.keep(find_kinds(part.text, self.protect), self.escape)
                if hide:
                    part.text = part.root.hide_leaves(part.text)
        return parts

    def escape(self, text: str) -> str:
        """Escape a text as in a document with tags. Plain text is unchanged."""
        return text if self.rules is None else html.escape(text, quote=False)


class FormattedTranslation(NamedTuple):
    """Distinct translations of a text, the best first. A text with tags has only one. `note`: see `join_notes`."""

    texts: list[str]
    note: dict[str, str]

    @property
    def text(self) -> str:
        return self.texts[0]


async def translate_or_keep(
    service: Service,
    texts: Sequence[str],
    routes: Sequence[Route | None],
    guesses: Sequence[Guess],
    form: TextFormat | None,
    options: DecodingOptions = _DEFAULT,
    *,
    end: float,
) -> list[FormattedTranslation]:
    """Translate texts, with or without a format. A text without a route is returned unchanged, with a note.

    `routes`, `guesses`: see `choose_routes`. `form`: the format, or None for plain text.
    """
    known, sources = list(filter(None, routes)), list(compress(texts, routes))
    if form is not None:
        translated = await translate_formatted(service, sources, known, form, options, end=end)
    else:
        results = await translate_texts(service, sources, known, options, end=end)

        def candidates() -> list[FormattedTranslation]:
            return [FormattedTranslation([best.text for best in result.candidates], result.note) for result in results]

        translated = await offload(sum(len(result.sentences) for result in results) * options.n_best, candidates)
    remaining = iter(translated)
    return [
        FormattedTranslation([text], _note_on_language(guess)) if route is None else next(remaining)
        for text, route, guess in zip(texts, routes, guesses, strict=True)
    ]


def _note_on_language(guess: Guess) -> dict[str, str]:
    """Make the field `note` of a text that is not translated because of its language; empty without a language."""
    if not guess["confidence"]:
        return {}
    language = f"detected as '{guess['language']}'"
    return {"note": f"not translated: {language}; if parts of it are in another language, name the source language"}


async def translate_formatted(
    service: Service,
    texts: Sequence[str],
    routes: Sequence[Route],
    form: TextFormat,
    options: DecodingOptions = _DEFAULT,
    *,
    end: float | None = None,
) -> list[FormattedTranslation]:
    """Translate texts with tags or preserved parts. `form`: their format. Other arguments: see `translate_texts`."""
    end = service.deadline() if end is None else end
    async with expiring(end):
        parsed = [
            await asyncio.to_thread(form.parse, text, hide=route.has_placeholders)
            for text, route in zip(texts, routes, strict=True)
        ]
    segments = [[part for part in parts if isinstance(part, Segment)] for parts in parsed]
    flat = list(chain.from_iterable(segments))
    results = await translate_texts(
        service,
        [segment.text for segment in flat],
        [route for route, of_text in zip(routes, segments, strict=True) for _ in of_text],
        options,
        end=end,
        align={number for number, segment in enumerate(flat) if segment.root.needs_links},
    )
    remaining, translations = iter(results), list[FormattedTranslation]()
    async with expiring(end):
        for parts in parsed:
            written, sentences = list[str](), list[Translation]()
            for part in parts:
                if isinstance(part, str):
                    written.append(part)
                    continue
                result = next(remaining)
                sentences += result.sentences
                text = form.escape(result.text)
                if part.root.children:
                    text = await asyncio.to_thread(_transfer, part, result, form.escape)
                before, after = part.spaces
                written += [before, (text.lstrip(" ") if before else text).rstrip(" " if after else ""), after]
            translations.append(FormattedTranslation(["".join(written)], join_notes(sentences)))
    return translations


def _transfer(segment: Segment, result: TextTranslation, escape: Callable[[str], str]) -> str:
    """Put a segment's elements into its translation. Sentences that have only preserved parts are not translated."""
    spans = list(pairwise(accumulate(map(len, result.parts), initial=0)))
    kept = [(leaf.start, leaf.end) for leaf in segment.root.leaves()]
    gaps = [(end, start) for (_, end), (start, _) in pairwise([(0, 0), *kept, (len(segment.text), -1)])]
    texts, links = [sentence.text for sentence in result.sentences], dict(enumerate(result.links))
    for number, (first, last) in enumerate(spans[::2]):
        if not any(any(map(str.isalpha, segment.text[max(a, first) : min(b, last)])) for a, b in gaps):
            texts[number] = result.parts[2 * number]
            links.pop(number, None)
    parts = joined_parts(texts, result.parts)
    words: list[Word] = []
    targets = accumulate(map(len, parts), initial=0)
    for number, (text, (src, _), tgt) in enumerate(zip(parts, spans, targets, strict=False)):
        links_to_itself = [Link(*word.span(), *word.span()) for word in re.finditer(r"\S+", text)]
        links_of_part = links_to_itself if number % 2 else links.get(number // 2, links_to_itself)
        words += words_of(text, links_of_part, src=src, tgt=tgt, number=number)
    return project(segment.root, segment.text, "".join(parts), words, spans, escape)
