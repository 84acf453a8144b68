"""The translation service without HTTP: runs, routes between languages, start, reload and shutdown."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any

from transduce.config.decoding import DecodingOptions
from transduce.config.settings import Direction
from transduce.decoding.alignment import Link, joined_links
from transduce.decoding.generator import Generator
from transduce.decoding.open_run import AnyPrecision, identity_of
from transduce.decoding.results import TextLogProbs, Translation, joined_note
from transduce.decoding.translator import Translator
from transduce.errors import SettingsError, listed, nearest
from transduce.runs.folder import RunFolder
from transduce.serving.access import Admission, DrainingError, Limits, OverloadedError, check_at_most
from transduce.serving.async_models import AsyncTextGenerator, AsyncTranslator
from transduce.serving.glossaries import Glossaries
from transduce.text.languages import Languages, base_language, normalize_code

_DEFAULT, _LIMITS = DecodingOptions(), Limits()
_SHOWN = 20  # maximum language pairs in an error


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A run to serve, and its languages if they are named. `ensemble`: further runs to translate with it."""

    path: Path
    source: str | None = None
    target: str | None = None
    ensemble: tuple[Path, ...] = ()

    def identity(self) -> str:
        """A value that changes if the models change. See `identity_of`."""
        return identity_of((self.path, *self.ensemble))

    @classmethod
    def parse(cls, text: str) -> RunSpec:
        """Parse a command-line argument: RUN or SOURCE-TARGET=RUN; RUN+RUN for an ensemble.

        >>> RunSpec.parse("en-de=runs/x+runs/y")
        RunSpec(path=PosixPath('runs/x'), source='en', target='de', ensemble=(PosixPath('runs/y'),))
        """
        direction, equals, runs = text.partition("=")
        is_plain = not equals or Path(text).exists()
        source, _, target = (None, "", None) if is_plain else direction.rpartition("-")
        runs = text if is_plain else runs
        paths = [runs] if Path(runs).exists() else runs.split("+")
        if not all(paths) or not (is_plain or (source and target)):
            raise SettingsError(f"'{text}': a run is RUN, or SOURCE-TARGET=RUN, as en-de=runs/x; RUN+RUN: an ensemble")
        path, *ensemble = map(Path, paths)
        return cls(path, source, target, tuple(ensemble))


@dataclass(frozen=True, slots=True)
class ServedRun:
    """A loaded run of a service.

    directions: Its translation directions; empty for a language model. identity: See `RunSpec.identity`.
    """

    name: str
    path: Path
    directions: tuple[Direction, ...]
    model: AsyncTranslator | AsyncTextGenerator
    identity: str

    @property
    def translator(self) -> AsyncTranslator:
        """The model of a run that translates. For a direction, see `ServedDirection.translator`."""
        assert isinstance(self.model, AsyncTranslator)
        return self.model

    @property
    def has_language_tokens(self) -> bool:
        """Whether the run is a translator whose texts begin with language tokens."""
        return bool(self.directions) and bool(self.translator.translator.tokenizers.src.framing.needed)


@dataclass(frozen=True, slots=True)
class ServedDirection:
    """A translation direction of a run."""

    run: ServedRun
    source: str
    target: str

    @property
    def translator(self) -> AsyncTranslator:
        translator = self.run.translator
        return translator.between(self.source, self.target) if self.run.has_language_tokens else translator


@dataclass(frozen=True, slots=True)
class Route:
    """A way to translate between two languages: a direction of a run, or two directions with a pivot language."""

    steps: tuple[ServedDirection, ...]

    @property
    def source(self) -> str:
        return self.steps[0].source

    @property
    def target(self) -> str:
        return self.steps[-1].target

    @property
    def languages(self) -> Direction:
        return self.source, self.target

    @property
    def name(self) -> str:
        return "+".join(step.run.name for step in self.steps)

    @property
    def has_placeholders(self) -> bool:
        """Whether all translators of the route can copy parts of a text (`text.placeholders`)."""
        return all(step.translator.translator.tokenizers.have_placeholders for step in self.steps)

    def split(self, text: str, options: DecodingOptions) -> list[str]:
        """Split a text into sentences and separators. See `Translator.split`."""
        return self.steps[0].translator.translator.split(text, options, self.source)


def find_routes(runs: Sequence[ServedRun], *, pivot: bool) -> list[Route]:
    """List the routes of single runs and, with `pivot`, pairs of runs for language pairs that no single run has.

    Runs of one language pair come before runs of many languages.
    """
    translators = sorted(runs, key=lambda run: run.has_language_tokens)
    routes = [Route((ServedDirection(run, *pair),)) for run in translators for pair in run.directions]
    if not pivot:
        return routes
    singles = {route.languages: route for route in reversed(routes)}
    sources, targets = (dict.fromkeys(getattr(route, side) for route in routes) for side in ("source", "target"))
    missing = {source: [t for t in targets if t != source and (source, t) not in singles] for source in sources}
    pivots = dict[Direction, Route]()
    for first in routes:
        for target in missing[first.source]:
            ends, second = (first.source, target), singles.get((first.target, target))
            if second is not None and ends not in pivots:
                pivots[ends] = Route((*first.steps, *second.steps))
    return [*routes, *pivots.values()]


class RouteTable:
    """Finds a route by its languages and name. Of several equal routes, it finds the first."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes, self._named, self._called = routes, dict[str, list[Route]](), dict[str, RouteTable]()
        self._by_languages = {normalize: dict[Languages, Route]() for normalize in (normalize_code, base_language)}
        for route in routes:
            self._named.setdefault(route.name, []).append(route)
            for normalize, table in self._by_languages.items():
                source, target = map(normalize, route.languages)
                for key in product((source, None), (target, None)):
                    table.setdefault(key, route)

    def find(self, source: str | None, target: str | None) -> Route | None:
        """Find a route between languages (None: any), or else, for a variant such as en-GB, between base languages."""
        for normalize, table in self._by_languages.items():
            if route := table.get((source and normalize(source), target and normalize(target))):
                return route
        return None

    def called(self, name: str) -> RouteTable:
        """The routes that a request may mean by `name`: a route's name, or languages (en-de, EN_DE, en-pt-BR)."""
        if name in self._called:
            return self._called[name]
        subtags = re.split("[-_]", name, maxsplit=6)  # at most seven parts, enough for two codes such as zh-Hans-CN
        pairs = [("-".join(subtags[:n]), "-".join(subtags[n:])) for n in range(1, len(subtags))]
        exact = self._by_languages[normalize_code]
        found = (exact.get((normalize_code(source), normalize_code(target))) for source, target in pairs)
        table = RouteTable([*self._named.get(name, ()), *filter(None, found)])
        if name in self._named:  # clients may send any other name, and those tables are small
            self._called[name] = table
        return table

    def listed(self) -> str:
        """List the language pairs, for an error message."""
        pairs = list(dict.fromkeys("-".join(route.languages) for route in self.routes))
        return listed(pairs, _SHOWN)


@dataclass(frozen=True, slots=True)
class RouteTranslation:
    """Sentences that a route has translated. `sources`: the input of each run of the route, in order."""

    route: Route
    sources: Sequence[Sequence[str]]
    sentences: Sequence[Translation]

    async def align(self, end: float, wanted: Sequence[bool]) -> list[list[Link]]:
        """Align the words of the `wanted` sentences. Other sentences get no links.

        `end`: time limit, a time of the event loop. See `AsyncTranslator.align`.
        """
        outputs: list[Sequence[str | Translation]] = [*self.sources[1:], self.sentences]
        targets = [[text if want else "" for text, want in zip(texts, wanted, strict=True)] for texts in outputs]
        steps = zip(self.route.steps, self.sources, targets, strict=True)
        links = [await step.translator.align(srcs, tgts, end=end) for step, srcs, tgts in steps]
        return [reduce(joined_links, links_of_steps) for links_of_steps in zip(*links, strict=True)]

    async def score(self, end: float) -> list[TextLogProbs]:
        """Score the tokens of each best translation, given the input of the last run, until the time `end`."""
        last = self.route.steps[-1].translator
        return await last.score(self.sources[-1], [sentence.ids for sentence in self.sentences], end=end)


def _result_of_steps(steps: Sequence[Translation]) -> Translation:
    """Return the last of a route's translations of a sentence, with all notes, and unfinished if any is unfinished."""
    last = steps[-1]
    if not all(step.finished for step in steps):
        last = replace(last, candidates=tuple(replace(one, finished=False) for one in last.candidates))
    return replace(last, note=joined_note(steps))


class Service:
    """Translates between the languages of its runs. Used from one event loop.

    >>> service = Service([RunSpec(Path("runs/en-de"))])                                    # doctest: +SKIP
    >>> await service.start()                                                               # doctest: +SKIP
    >>> await service.translate(["A dog."], service.route("en", "de"))                      # doctest: +SKIP
    """

    def __init__(
        self,
        specs: Sequence[RunSpec],
        *,
        limits: Limits = _LIMITS,
        device: str = "auto",
        precision: AnyPrecision = "float32",
        pivot: bool = False,
        glossaries: Glossaries | None = None,
    ) -> None:
        """Make a service that is not ready until `start` has loaded its runs.

        `device`, `precision`: see `Translator.load`. `pivot`: also offer pairs of runs with a pivot language.
        `glossaries`: glossaries of clients (default: kept in memory).
        """
        self.limits, self.admission = limits, Admission(limits)
        grouped = dict[RunSpec, list[RunSpec]]()
        for spec in specs:
            grouped.setdefault(replace(spec, source=None, target=None), []).append(spec)
        self._specs, self._device, self._precision, self._pivot = tuple(grouped.values()), device, precision, pivot
        self._use(())
        self._reloading = asyncio.Lock()
        self._requests: set[asyncio.Event] = set()  # an event for each request, set when the request ends
        self.glossaries = glossaries or Glossaries()
        self.is_draining = False

    @property
    def n_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    def _use(self, runs: tuple[ServedRun, ...]) -> None:
        self.runs, self.routes = runs, find_routes(runs, pivot=self._pivot)
        self._table = RouteTable(self.routes)

    async def start(self) -> None:
        """Load all runs and warm them up."""
        if twice := [spec.path for specs in self._specs for spec in specs if specs.count(spec) > 1]:
            raise SettingsError(f"{twice[0]} is given twice; leave one out, or name other languages")
        for specs in self._specs:
            self._use((*self.runs, await self._load(specs)))
        names = [run.name for run in self.runs]
        if doubled := [name for name in names if names.count(name) > 1]:
            await self.close()
            raise SettingsError(f"two runs are named '{doubled[0]}'; copy one to a folder of another name")

    async def _load(self, specs: Sequence[RunSpec]) -> ServedRun:
        """Load the run of these specs, which differ only in their languages."""
        path, ensemble = specs[0].path, specs[0].ensemble
        identity = await asyncio.to_thread(specs[0].identity)
        folder = await asyncio.to_thread(RunFolder.open, path)
        # The name of a file in a request must not open the file.
        folder.settings.model.require_text("the service", run=folder.path)
        options: dict[str, Any] = {"device": self._device, "precision": self._precision}
        model: AsyncTranslator | AsyncTextGenerator
        directions: tuple[Direction, ...] = ()
        if folder.settings.task == Generator.task:
            if any(spec.source for spec in specs):
                raise SettingsError(f"{path} is a language model; serve it as {path}, without languages")
            if ensemble:
                raise SettingsError(f"{path} is a language model; only translators form an ensemble")
            generator = await asyncio.to_thread(Generator.load, path, **options)
            model = AsyncTextGenerator(generator, self.admission)
        else:
            translator = await asyncio.to_thread(Translator.load, [path, *ensemble], **options)
            directions = await asyncio.to_thread(_directions_of, translator, specs)
            model = AsyncTranslator(translator, self.admission)
        run = ServedRun(path.absolute().name, path, directions, model, identity)
        try:
            await (ServedDirection(run, *directions[0]).translator if directions else model).warm_up()
        except BaseException:
            await model.close()
            raise
        return run

    async def reload(self) -> tuple[list[str], list[Exception]]:
        """Load the runs whose folders have changed, and then replace the old models.

        Requests that have begun end with the old model. If a folder cannot be loaded, the old model stays in service.
        Returns the names of the replaced runs, and the errors of failed runs.
        """
        names, errors = list[str](), list[Exception]()
        async with self._reloading:
            for specs, old in zip(self._specs, self.runs, strict=True):
                try:
                    if await asyncio.to_thread(specs[0].identity) == old.identity:
                        continue
                    new = await self._load(specs)
                    self._use(tuple(new if run is old else run for run in self.runs))
                    names.append(new.name)
                    try:
                        await self._requests_ended()  # running requests may still need the old run
                    finally:
                        await old.model.close()
                except Exception as error:  # any problem of the new folder leaves the old run in service
                    errors.append(error)
        return names, errors

    def route(self, source: str | None = None, target: str | None = None, *, name: str | None = None) -> Route:
        """Find the first route with these languages and this name (see `RouteTable.called`), all optional.

        If no route has a variant of a language, such as en-GB, a route of the base language is used. Raises
        `SettingsError` if there is no route.
        """
        source, target = source or None, target or None  # clients leave fields of forms empty
        table = self._table if name is None else self._table.called(name)
        if name is not None and source is target is None:
            pairs = {route.languages for route in table.routes if route.name == name}
            if len(pairs) > 1:
                raise SettingsError(f"model '{name}' has several directions; name one of {table.listed()}")
        if route := table.find(source, target):
            return route
        if name in self.generators():
            raise SettingsError(f"model '{name}' is a language model, which does not translate; use /v1/completions")
        if not self.routes:
            raise SettingsError(f"no model here translates; language models: {', '.join(self.generators())}")
        if name is not None and not table.routes:
            names = [*dict.fromkeys(route.name for route in self.routes), *self.generators()]
            raise SettingsError(f"model '{name}'{nearest(name, names)}; available: {', '.join(names)}")
        asked = f"from {source or 'any'} to {target or 'any'}"
        raise SettingsError(f"no model translates {asked}; available: {self._table.listed()}")

    def generators(self) -> dict[str, AsyncTextGenerator]:
        return {run.name: run.model for run in self.runs if isinstance(run.model, AsyncTextGenerator)}

    @contextmanager
    def request(self) -> Iterator[None]:
        """Context of all work for one request. Raises `OverloadedError` or `DrainingError`."""
        if self.is_draining:
            raise DrainingError("the service is shutting down")
        if self.n_requests >= self.limits.max_requests:
            raise OverloadedError("too many requests are waiting; try again later")
        ended = asyncio.Event()
        self._requests.add(ended)
        try:
            yield
        finally:
            ended.set()
            self._requests.discard(ended)

    def deadline(self, seconds: float | None = None) -> float:
        """The time of the event loop at which a request expires. `seconds`: a time limit below the service's limit."""
        most = self.limits.seconds
        return asyncio.get_running_loop().time() + (most if seconds is None else min(seconds, most))

    async def translate(
        self,
        sentences: Sequence[str],
        route: Route,
        options: DecodingOptions = _DEFAULT,
        *,
        end: float | None = None,
        prefixes: Sequence[str] = (),
        refuse: bool = True,
    ) -> RouteTranslation:
        """Translate sentences until the deadline `end` (default: the deadline of a request that begins now).

        The other arguments are described at `AsyncTranslator.translate`.
        """
        end = self.deadline() if end is None else end
        check_at_most("sentences times n_best", len(sentences) * options.n_best, self.limits.max_translations)
        sources, translations = [sentences], list[Sequence[Translation]]()
        for step in route.steps[:-1]:
            one_best = options.model_copy(update={"n_best": 1})
            translations.append(await step.translator.translate(sources[-1], one_best, end=end, refuse=refuse))
            sources.append([translation.text for translation in translations[-1]])
            refuse = False  # never refuse the rest of a request that has begun
        last = route.steps[-1].translator
        translations.append(await last.translate(sources[-1], options, end=end, prefixes=prefixes, refuse=refuse))
        return RouteTranslation(route, sources, list(map(_result_of_steps, zip(*translations, strict=True))))

    async def drain(self) -> bool:
        """Refuse new requests, and wait for running ones. False if some still run after `limits.drain_seconds`."""
        self.is_draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._requests_ended(), self.limits.drain_seconds)
        return not self._requests

    async def _requests_ended(self) -> None:
        for request in tuple(self._requests):
            await request.wait()

    async def close(self) -> None:
        runs = self.runs
        self._use(())
        for run in runs:
            await run.model.close()


def _directions_of(translator: Translator, specs: Sequence[RunSpec]) -> tuple[Direction, ...]:
    """The directions to serve: all directions that the specs name, or else all directions of the run."""
    path, framing, own = specs[0].path, translator.tokenizers.src.framing, translator.languages
    named = dict.fromkeys((spec.source or own[0], spec.target or own[1]) for spec in specs)
    if not framing.needed:
        if len(named) > 1:
            raise SettingsError(f"{path} translates in one direction: name it once")
        return tuple(named)
    if all(spec.source for spec in specs):
        for pair in named:
            try:
                translator.between(*pair)
            except SettingsError as error:
                raise SettingsError(f"{path}: {error}") from None
        return tuple(named)
    if translator.tokenizers.src.frame is not None and not framing.directions:
        return (own,)
    codes = framing.usual_codes()
    return tuple((codes[src], codes[tgt]) for src, tgt in framing.pairs())
