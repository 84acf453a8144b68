"""The page at /inspect for inspecting runs, and its endpoints."""

from __future__ import annotations

import asyncio
import threading
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import RedirectResponse, Response

from transduce.config.decoding import DecodingOptions
from transduce.config.section import MAX_PENALTY
from transduce.decoding.queue import EXPIRED, ExpiredError, expiring
from transduce.errors import SettingsError, check_known
from transduce.inspection.inspected_models import Subject, open_subject
from transduce.inspection.inspection import Inspection, inspect_sentence
from transduce.inspection.page import PAGE, page_files
from transduce.inspection.site import sample_texts
from transduce.logging import Log
from transduce.runs.folder import RunFolder
from transduce.serving.access import OverloadedError
from transduce.serving.http import Call, Endpoint, file_response, json_response
from transduce.text.languages import Languages

_MOST_OPEN = 32  # maximum open inspections, of which one is computed; the page sends several for each click
MOST_BEAMS = 8  # maximum number of beams that the page can draw
Text = Annotated[str, Field(strict=True, max_length=10_000)]
Names = Annotated[list[str], Field(max_length=4096)]


class LookRequest(BaseModel):
    """A request to inspect one sentence.

    prefix: token ids that the output begins with. off: parts of the model to switch off. beam, length_penalty: options
    of beam search (default: the page's). values: names of the part whose matrices are requested, and of its residual
    connection (all parts together can take hundreds of megabytes). head: the attention head whose weights are
    included. views: names of the requested views (default: all except slow views).
    """

    model_config = ConfigDict(extra="forbid")
    run: str
    text: Text
    target: Text | None = None
    prefix: Annotated[list[int], Field(max_length=4096)] = []
    off: Names = []
    beam: Annotated[int, Field(ge=1, le=MOST_BEAMS)] | None = None
    length_penalty: Annotated[float, Field(ge=0, le=MAX_PENALTY)] | None = None
    values: Annotated[list[str], Field(max_length=2)] = []
    head: Annotated[int, Field(ge=0, le=4096)] | None = None
    views: Names = []


class CellRequest(LookRequest):
    """A request for the cell at `index` of the matrix named `value`."""

    value: str
    index: Annotated[list[int], Field(max_length=8)]


class InspectionPage:
    """Serves the page for runs of any task. PyTorch loads each run's model at the first request for it."""

    def __init__(
        self,
        runs: Mapping[str, Path],
        *,
        device: str = "auto",
        decoding: DecodingOptions | None = None,
        languages: Languages = (None, None),
        together: bool = False,
        browse: bool = False,
    ) -> None:
        """`runs`: the folders of the runs to show, by name.

        `decoding`: decoding options (default: each run's settings). `languages`: see `Translator.between`.
        `together`: show all runs side by side. `browse`: open the page in a browser.
        """
        self._runs, self._together, self._browse = runs, together, browse
        self._open = partial(open_subject, device=device, decoding=decoding, languages=languages)
        self._models: dict[str, Subject] = {}
        self._last: dict[str, tuple[Any, Inspection]] = {}  # each run's last inspection, for requests for cells
        self._n_open = 0
        self._given_up = threading.Event()  # set to cancel the worker's current request
        # One sentence at a time, with one thread: two threads do not speed up small products, and if other processes
        # are busy, the threads of OpenMP wait for one another.
        n_threads = torch.get_num_threads()
        self._worker = ThreadPoolExecutor(1, "inspect", initializer=torch.set_num_threads, initargs=(1,))
        # PyTorch copies the process's thread count into a thread on first use; trigger that here.
        self._worker.submit(torch.get_num_threads).result()
        torch.set_num_threads(n_threads)  # restore the number for threads that start later

    def endpoints(self) -> tuple[Endpoint, ...]:
        files = [Endpoint("GET", f"/inspect/{name}", self._file, is_open=True) for name in page_files()]
        return (
            Endpoint("GET", "/inspect", self._redirect, is_open=True),
            Endpoint("GET", "/inspect/", self._file, is_open=True),
            *files,
            Endpoint("GET", "/inspect/models", self._list_models, is_open=True),
            Endpoint("POST", "/inspect/look", self._answer_look, admit=self._admit),
            Endpoint("POST", "/inspect/cell", self._answer_cell, admit=self._admit),
        )

    def greet(self, address: str, log: Log) -> None:
        """Print the address of the page, and open it in a browser if requested."""
        log.say(f"look inside: {address}")
        if self._browse:
            webbrowser.open(address)

    def forget_models(self) -> None:
        self._models, self._last = {}, {}

    def close(self) -> None:
        """Cancel the worker's current work."""
        self._given_up.set()
        self._worker.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _admit(self) -> Iterator[None]:
        """Count an open inspection, apart from translation requests. Raises `OverloadedError` beyond 32."""
        if self._n_open >= _MOST_OPEN:
            raise OverloadedError("too many sentences are being inspected; try again later")
        self._n_open += 1
        try:
            yield
        finally:
            self._n_open -= 1

    async def _redirect(self, call: Call) -> Response:
        return RedirectResponse("/inspect/", status_code=308)

    async def _file(self, call: Call) -> Response:
        name = call.request.url.path.removeprefix("/inspect/") or "inspect.html"
        return file_response(PAGE / name)

    async def _list_models(self, call: Call) -> Response:
        models = []
        for name, path in self._runs.items():
            folder = RunFolder.open(path)
            kind, task = folder.settings.model.kind, folder.settings.task
            # The clients of a service may not read the texts of a run.
            examples = [] if call.service.runs else sample_texts(folder)
            models.append({"name": name, "kind": kind, "task": task, "together": self._together, "examples": examples})
        return json_response(models)

    async def _answer_look(self, call: Call) -> Response:
        asked = call.parse(LookRequest)
        weights = () if asked.head is None else asked.values

        def look(inspection: Inspection) -> Any:
            return inspection.to_json(asked.values, asked.views, weights=weights, head=asked.head)

        return await self._answer(call, asked, look)

    async def _answer_cell(self, call: Call) -> Response:
        asked = call.parse(CellRequest)

        def cell(inspection: Inspection) -> dict[str, Any] | None:
            if asked.value not in inspection.arrays:
                raise SettingsError(f"value = {asked.value}: this model has no such value")
            return inspection.cell(asked.value, asked.index)

        return await self._answer(call, asked, cell)

    async def _answer(self, call: Call, asked: LookRequest, answer: Callable[[Inspection], Any]) -> Response:
        call.take_texts([asked.text, asked.target or ""])
        check_known("run", asked.run, self._runs)
        given_up = threading.Event()
        try:
            async with expiring(call.end):
                work = self._worker.submit(lambda: answer(self._look(asked, given_up)))
                return json_response(await asyncio.wrap_future(work))
        finally:
            given_up.set()

    def _look(self, asked: LookRequest, given_up: threading.Event) -> Inspection:
        """Inspect a sentence, in the worker thread.

        If `given_up` is set meanwhile, raises `ExpiredError` at the model's next forward pass.
        """
        self._given_up = given_up
        models, known = self._models, self._last
        if asked.run not in models:
            models[asked.run] = subject = self._open(self._runs[asked.run])
            for module in subject.model.children():  # each forward pass begins with a child module, the embedding
                # Not a bound method: a copy of the model copies its hooks, and would then copy this page too.
                module.register_forward_pre_hook(lambda *_: self._check_given_up())
        key = asked.model_dump(include=set(LookRequest.model_fields) - {"values", "views", "head"})
        last_key, inspection = known.get(asked.run, (None, None))
        if inspection is None or last_key != key:
            search = asked.model_dump(include={"beam", "length_penalty"}, exclude_none=True)
            inspection = inspect_sentence(
                models[asked.run],
                asked.text,
                asked.target,
                prefix=asked.prefix,
                off=asked.off,
                decoding=DecodingOptions(**search) if search else None,
            )
            known[asked.run] = key, inspection
        return inspection

    def _check_given_up(self) -> None:
        if self._given_up.is_set():
            raise ExpiredError(EXPIRED)


def named_runs(paths: Sequence[Path]) -> dict[str, Path]:
    """Run folders by name, or by path if several have the same name."""
    names = [path.absolute().name for path in paths]
    return {name if names.count(name) == 1 else str(path): path for name, path in zip(names, paths, strict=True)}
