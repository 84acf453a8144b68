"""The translation service without HTTP: its runs, what it accepts, and how it starts, reloads and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transduce.config.decoding import DecodingOptions
from transduce.decoding.generator import Generator
from transduce.decoding.loading import AnyPrecision, check_reads_text
from transduce.decoding.translator import Translator
from transduce.errors import SettingsError, nearest
from transduce.runs.folder import RunFolder
from transduce.serving.async_generator import AsyncTextGenerator
from transduce.serving.async_translator import AsyncTranslator
from transduce.serving.glossaries import Glossaries
from transduce.serving.limits import Admission, DrainingError, Limits, OverloadedError, check_at_most
from transduce.serving.routes import Route, RouteTranslation, RunSpec, ServedRun, find_routes
from transduce.text.languages import base_language

_DEFAULT, _LIMITS = DecodingOptions(), Limits()


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
        """Make a service that is not ready yet: see `start`.

        Args:
            specs: The runs.
            limits: What is accepted.
            device: auto, cpu or cuda.
            precision: As for `Translator.load`.
            pivot: Also offer pairs of runs, by way of a third language.
            glossaries: Of clients; in memory, if not given.
        """
        self.limits, self.admission = limits, Admission(limits)
        self._specs, self._device, self._precision, self._pivot = tuple(specs), device, precision, pivot
        self.runs: tuple[ServedRun, ...] = ()
        """In service now."""
        self.routes: Sequence[Route] = ()
        """Of these runs: see `find_routes`."""
        self._reloading = asyncio.Lock()
        self._requests: set[asyncio.Event] = set()  # each is set when the request ends
        self.glossaries = glossaries or Glossaries()
        self.is_draining = False

    @property
    def n_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def _use(self, runs: tuple[ServedRun, ...]) -> None:
        self.runs, self.routes = runs, find_routes(runs, pivot=self._pivot)

    async def start(self) -> None:
        """Load all runs and decode something with each."""
        for spec in self._specs:
            self._use((*self.runs, await self._load(spec)))
        names = [run.name for run in self.runs]
        if doubled := [name for name in names if names.count(name) > 1]:
            await self.close()
            raise SettingsError(f"two runs are named '{doubled[0]}'; copy one to a folder of another name")

    async def _load(self, spec: RunSpec) -> ServedRun:
        identity = await asyncio.to_thread(_identity, spec.path)
        folder = await asyncio.to_thread(RunFolder.open, spec.path)
        check_reads_text(folder, "the service")  # a name of a file in a request must open nothing
        settings = folder.settings
        source, target = spec.source or settings.data.src_lang, spec.target or settings.data.tgt_lang
        how: dict[str, Any] = {"device": self._device, "precision": self._precision}
        model: AsyncTranslator | AsyncTextGenerator
        if settings.task == Generator.task:
            if spec.source is not None:
                raise SettingsError(f"{spec.path} is a language model; serve it as {spec.path}, without languages")
            source = target = ""
            generator = await asyncio.to_thread(Generator.load, spec.path, **how)
            model = AsyncTextGenerator(generator, self.admission)
        else:
            translator = await asyncio.to_thread(Translator.load, spec.path, **how)
            model = AsyncTranslator(translator, self.admission)
        try:
            await model.warm_up()
        except BaseException:
            await model.close()
            raise
        return ServedRun(spec.path.absolute().name, spec.path, source, target, model, identity)

    async def reload(self) -> tuple[list[str], list[Exception]]:
        """Load the runs whose folders have changed beside the old ones, and swap them.

        Work inside `request` ends with the old run. A folder that cannot be loaded leaves the old run in service.
        Returns the names of the runs that were swapped, and the errors of the others.
        """
        names, errors = list[str](), list[Exception]()
        async with self._reloading:
            for spec, old in zip(self._specs, self.runs, strict=True):
                try:
                    if await asyncio.to_thread(_identity, spec.path) == old.identity:
                        continue
                    new = await self._load(spec)
                    self._use(tuple(new if run is old else run for run in self.runs))
                    names.append(new.name)
                    try:
                        await self._requests_ended()  # they may still need the old run
                    finally:
                        await old.model.close()
                except Exception as error:  # whatever is wrong with the new folder
                    errors.append(error)
        return names, errors

    def route(self, source: str | None = None, target: str | None = None, *, name: str | None = None) -> Route:
        """The first route of these languages and this name (see `Route.is_called`); without them, the first one.

        Where no route has a language's variant, such as en-GB, one of the language will do. Raises `SettingsError`:
        there is none.
        """
        routes = self.routes
        source, target = source or None, target or None  # clients leave fields of forms empty
        for same in (str.lower, base_language):
            for route in routes:
                if route.translates(source, target, same=same) and (name is None or route.is_called(name)):
                    return route
        if name in self.generators():
            raise SettingsError(f"model '{name}' is a language model, which does not translate; use /v1/completions")
        if not routes:
            raise SettingsError(f"no model here translates; language models: {', '.join(self.generators())}")
        if name is not None and not any(route.is_called(name) for route in routes):
            names = [*(route.name for route in routes), *self.generators()]
            raise SettingsError(f"model '{name}'{nearest(name, names)}; available: {', '.join(names)}")
        known = ", ".join(dict.fromkeys(f"{route.source}-{route.target}" for route in routes))
        raise SettingsError(f"no model translates from {source or 'any'} to {target or 'any'}; available: {known}")

    def generators(self) -> dict[str, AsyncTextGenerator]:
        return {run.name: run.model for run in self.runs if isinstance(run.model, AsyncTextGenerator)}

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around all work for one request; raises `OverloadedError` or `DrainingError`."""
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
        """The time of the event loop at which a request expires. `seconds`: shorter than the limits' time, if given."""
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
        on_part: Callable[[str], object] | None = None,
    ) -> RouteTranslation:
        """Translate sentences until the deadline `end`, by default that of a request which begins now.

        The other arguments are those of `AsyncTranslator.translate`.
        """
        end = self.deadline() if end is None else end
        check_at_most("sentences times n_best", len(sentences) * options.n_best, self.limits.max_translations)
        sources = [sentences]
        for run in route.runs[:-1]:
            one_best = options.model_copy(update={"n_best": 1})
            middle = await run.translator.translate(sources[-1], one_best, end=end, refuse=refuse)
            sources.append([one.text for one in middle])
            refuse = False  # some of the work is done
        last = route.runs[-1].translator
        found = await last.translate(sources[-1], options, end=end, prefixes=prefixes, refuse=refuse, on_part=on_part)
        return RouteTranslation(route, sources, found)

    async def drain(self) -> bool:
        """Take no more requests, and wait for those that run; False if they did not end in the limits' time."""
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


def _identity(path: Path) -> str:
    """Changes when the model of a run folder is replaced. Raises `RunFolderError`: there is none."""
    return RunFolder.open(path).model_digest()
