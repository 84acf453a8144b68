"""Runs in service, the routes between languages that they make, and what was translated by way of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from transduce.decoding.alignment import Link, joined_links
from transduce.decoding.results import Score, Translation
from transduce.serving.async_generator import AsyncTextGenerator
from transduce.serving.async_translator import AsyncTranslator


@dataclass(frozen=True, slots=True)
class ServedRun:
    """A run in service.

    identity: changes when its weights or its settings do. source, target: languages; empty for a language model.
    """

    name: str
    path: Path
    source: str
    target: str
    model: AsyncTranslator | AsyncTextGenerator
    identity: str

    @property
    def translator(self) -> AsyncTranslator:
        """The model of a run that translates."""
        assert isinstance(self.model, AsyncTranslator)
        return self.model


@dataclass(frozen=True, slots=True)
class Route:
    """The runs that translate from one language to another: one, or two by way of a third language."""

    runs: tuple[ServedRun, ...]

    @property
    def source(self) -> str:
        """Language code of the texts."""
        return self.runs[0].source

    @property
    def target(self) -> str:
        """Language code of the translations."""
        return self.runs[-1].target

    @property
    def name(self) -> str:
        """The names of the runs."""
        return "+".join(run.name for run in self.runs)

    def is_called(self, name: str) -> bool:
        """Whether a request may mean this route: by its name, or by languages such as en-de in any case."""
        return name == self.name or name.lower() == f"{self.source}-{self.target}".lower()


@dataclass(frozen=True, slots=True)
class RouteTranslation:
    """Sentences that were translated by way of a route. `sources`: what each of its runs translated."""

    route: Route
    sources: Sequence[Sequence[str]]
    sentences: Sequence[Translation]

    async def align(self, end: float) -> list[list[Link]]:
        """The words of each sentence with the words that translate them: see `AsyncTranslator.align`."""
        texts = [*self.sources, [one.text for one in self.sentences]]
        steps = zip(self.route.runs, texts, texts[1:], strict=False)
        links = [await run.translator.align(srcs, tgts, end=end) for run, srcs, tgts in steps]
        return [reduce(joined_links, one) for one in zip(*links, strict=True)]

    async def score(self, end: float) -> list[Score]:
        """The log-probabilities of the tokens of each best translation, given what its last run translated."""
        last = self.route.runs[-1].translator
        return await last.score(self.sources[-1], [one.ids for one in self.sentences], end=end)
