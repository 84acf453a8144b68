"""Runs in service, the routes between languages that they make, and what was translated by way of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from pathlib import Path

from transduce.decoding.alignment import Link, joined_links
from transduce.decoding.results import TextLogProbs, Translation
from transduce.errors import SettingsError
from transduce.serving.async_generator import AsyncTextGenerator
from transduce.serving.async_translator import AsyncTranslator


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A run to serve, as given on the command line: PATH, or SOURCE-TARGET=PATH where the run does not know."""

    path: Path
    source: str | None = None
    target: str | None = None

    @classmethod
    def parse(cls, text: str) -> RunSpec:
        """Read the argument.

        >>> RunSpec.parse("en-de=runs/x")
        RunSpec(path=PosixPath('runs/x'), source='en', target='de')
        """
        direction, equals, path = text.partition("=")
        source, dash, target = direction.rpartition("-")
        if not equals or Path(text).exists():
            return cls(Path(text))
        if not (dash and source and target and path):
            raise SettingsError(f"'{text}': a run is RUN, or SOURCE-TARGET=RUN, such as en-de=runs/x")
        return cls(Path(path), source, target)


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
        return self.runs[0].source

    @property
    def target(self) -> str:
        return self.runs[-1].target

    @property
    def languages(self) -> tuple[str, str]:
        """Codes of the source and the target."""
        return self.source, self.target

    @property
    def name(self) -> str:
        return "+".join(run.name for run in self.runs)

    def is_called(self, name: str) -> bool:
        """Whether a request may mean this route: by its name, or by languages such as en-de in any case."""
        return name == self.name or name.lower() == f"{self.source}-{self.target}".lower()

    def translates(self, source: str | None, target: str | None, *, same: Callable[[str], str]) -> bool:
        """Whether these are the languages, where they are given; `same`: what is compared of two codes."""
        return all(
            wanted is None or same(wanted) == same(has)
            for wanted, has in zip((source, target), self.languages, strict=True)
        )


def find_routes(runs: Sequence[ServedRun], *, pivot: bool) -> list[Route]:
    """The routes of single runs; with `pivot`, also pairs of runs for pairs of languages that no run translates."""
    runs = [run for run in runs if isinstance(run.model, AsyncTranslator)]
    routes = [Route((run,)) for run in runs]
    known = {route.languages for route in routes}
    for first, second in product(runs, runs) if pivot else ():
        ends = first.source, second.target
        if first.target == second.source and ends[0] != ends[1] and ends not in known:
            known.add(ends)
            routes.append(Route((first, second)))
    return routes


@dataclass(frozen=True, slots=True)
class RouteTranslation:
    """Sentences that were translated by way of a route. `sources`: what each of its runs translated."""

    route: Route
    sources: Sequence[Sequence[str]]
    sentences: Sequence[Translation]

    async def align(self, end: float, wanted: Sequence[bool]) -> list[list[Link]]:
        """The links between the words of the sentences that are wanted; none of others. See `AsyncTranslator.align`."""
        outputs: list[Sequence[str | Translation]] = [*self.sources[1:], self.sentences]
        targets = [[one if want else "" for one, want in zip(some, wanted, strict=True)] for some in outputs]
        steps = zip(self.route.runs, self.sources, targets, strict=True)
        links = [await run.translator.align(srcs, tgts, end=end) for run, srcs, tgts in steps]
        return [reduce(joined_links, one) for one in zip(*links, strict=True)]

    async def score(self, end: float) -> list[TextLogProbs]:
        """The log-probabilities of the tokens of each best translation, given what its last run translated."""
        last = self.route.runs[-1].translator
        return await last.score(self.sources[-1], [one.ids for one in self.sentences], end=end)
