"""Translate texts with tags, or with parts that must stay: see `markup` and `protected`."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from transduce.config.decoding import DecodingOptions
from transduce.decoding.alignment import Link
from transduce.serving.concurrency import expiring
from transduce.serving.routes import Route
from transduce.serving.service import Service
from transduce.serving.tags.markup import MarkupRules, Segment, parse_markup
from transduce.serving.tags.protected import DEFAULT_KINDS, Kind, find_kinds, find_terms
from transduce.serving.tags.transfer import Element, Word, project, words_of
from transduce.serving.texts import TextTranslation, joined_parts, translate_texts
from transduce.text.special import Span

_DEFAULT = DecodingOptions()


@dataclass(frozen=True, slots=True)
class TextFormat:
    """The parts of a text to preserve.

    rules: how its tags are handled; None: it has none. protect: what else stays. terms: translations of a glossary.
    """

    rules: MarkupRules | None = None
    protect: Collection[Kind] = DEFAULT_KINDS
    terms: Mapping[str, str] = field(default_factory=dict)

    def parse(self, text: str) -> list[str | Segment]:
        """The segments of a text, and what is between them."""
        parts: list[str | Segment] = [Segment(text, Element(0, len(text)))]
        if self.rules is not None:
            parts = parse_markup(text, self.rules)
        for part in parts:
            if isinstance(part, Segment):
                part.root.keep(find_terms(part.text, self.terms), self.escape)
                part.root.keep(find_kinds(part.text, self.protect), self.escape)
        return parts

    def escape(self, text: str) -> str:
        """Text as escaped in a document."""
        return text if self.rules is None else html.escape(text, quote=False)


async def translate_formatted(
    service: Service,
    texts: Sequence[str],
    routes: Sequence[Route],
    form: TextFormat,
    options: DecodingOptions = _DEFAULT,
    *,
    end: float | None = None,
    split: bool = True,
) -> list[str]:
    """Translate texts; arguments as for `translate_texts`. Only segments with tags or kept parts are aligned."""
    end = service.deadline() if end is None else end
    async with expiring(end):
        parsed = [await asyncio.to_thread(form.parse, text) for text in texts]
    segments = [
        (part, route)
        for parts, route in zip(parsed, routes, strict=True)
        for part in parts
        if isinstance(part, Segment)
    ]
    results = await translate_texts(
        service,
        [segment.text for segment, _ in segments],
        [route for _, route in segments],
        options,
        end=end,
        split=split,
        align={place for place, (segment, _) in enumerate(segments) if segment.root.children},
    )
    found = list[str]()
    async with expiring(end):
        for (segment, _), result in zip(segments, results, strict=True):
            text = form.escape(result.text)
            if segment.root.children:
                text = await asyncio.to_thread(_transfer, segment, result, form.escape)
            found.append(_spaced(segment, text))
    rest = iter(found)
    return ["".join(part if isinstance(part, str) else next(rest) for part in parts) for parts in parsed]


def _spaced(segment: Segment, text: str) -> str:
    before, after = segment.spaces
    return before + (text.lstrip(" ") if before else text).rstrip(" " if after else "") + after


def _transfer(segment: Segment, found: TextTranslation, escape: Callable[[str], str]) -> str:
    """The translation of a segment with its elements. Sentences without words between their kept parts stay."""
    starts = list(accumulate(map(len, found.parts), initial=0))[::2]
    sentences = [(start, start + len(text)) for start, text in zip(starts, found.parts[::2], strict=False)]
    gaps = _between([(leaf.start, leaf.end) for leaf in segment.root.leaves()], len(segment.text))
    texts, links = [one.text for one in found.sentences], list(found.links)
    for number, (first, last) in enumerate(sentences):
        if not any(any(map(str.isalnum, segment.text[max(a, first) : min(b, last)])) for a, b in gaps):
            texts[number] = found.parts[2 * number]
            links[number] = [Link(*m.span(), *m.span()) for m in re.finditer(r"\S+", texts[number])]
    parts = joined_parts(texts, found.parts, *found.route.languages)
    targets = list(accumulate(map(len, parts), initial=0))[::2]
    words: list[Word] = []
    for number, (text, some) in enumerate(zip(texts, links, strict=True)):
        words += words_of(text, some, src=sentences[number][0], tgt=targets[number], number=number)
    return project(segment.root, segment.text, "".join(parts), words, sentences, escape)


def _between(spans: Sequence[Span], length: int) -> list[Span]:
    """The parts of a text of this length around spans, which are in order."""
    return [(end, start) for (_, end), (start, _) in pairwise([(0, 0), *spans, (length, length)])]
