"""The page that shows the inside of the runs, at /inspect, and the requests that it makes."""

from __future__ import annotations

import asyncio
import threading
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import RedirectResponse, Response

from transduce.config.decoding import DecodingOptions
from transduce.decoding.queue import EXPIRED, ExpiredError
from transduce.errors import SettingsError
from transduce.inspection.look import Inspection, look
from transduce.inspection.page import page_files, read_page_file
from transduce.inspection.subjects import Subject, open_subject
from transduce.logging import Log
from transduce.nn.embedding import TokenEmbedding, VectorEmbedding
from transduce.runs.folder import RunFolder
from transduce.serving.concurrency import expiring
from transduce.serving.http import Call, Endpoint, json_response
from transduce.serving.web_page import file_response

ResultT = TypeVar("ResultT")
Text = Annotated[str, Field(strict=True, max_length=10_000)]
Names = Annotated[list[str], Field(max_length=4096)]


class LookRequest(BaseModel):
    """A request to inspect one sentence.

    values: names of the parts whose matrices are wanted. views: names of those wanted (default: all but the slow ones).
    """

    model_config = ConfigDict(extra="forbid")
    run: str
    text: Text
    target: Text | None = None
    prefix: Annotated[list[int], Field(max_length=4096)] = []
    off: Names = []
    values: Names = []
    views: Names = []


class CellRequest(LookRequest):
    """One cell of a value."""

    value: str
    index: Annotated[list[int], Field(max_length=8)]


@dataclass(slots=True)
class _Model:
    """The model of a run and its last inspection, whose cells the page asks for."""

    subject: Subject
    last: tuple[Any, Inspection] | None = None


class InspectionPage:
    """Serves the page for runs of any task. Their models are loaded with PyTorch at the first request for each."""

    def __init__(
        self,
        runs: Mapping[str, Path],
        *,
        device: str = "auto",
        decoding: DecodingOptions | None = None,
        together: bool = False,
        browse: bool = False,
    ) -> None:
        """Show these runs.

        `decoding`: how they translate (default: as each run says). `together`: the page shows all runs side by side.
        `browse`: open it in a browser.
        """
        self._runs, self._together, self._browse = runs, together, browse
        self._open = partial(open_subject, device=device, decoding=decoding)
        self._models: dict[str, _Model] = {}
        self._given_up = threading.Event()  # of the request that the worker works for
        # One sentence at a time, with one thread: small products gain nothing from two, and where other processes are
        # busy, the threads of OpenMP wait for one another.
        self._worker, n_threads = ThreadPoolExecutor(1, "inspect"), torch.get_num_threads()
        self._worker.submit(_use_one_thread).result()
        torch.set_num_threads(n_threads)  # threads that begin later have as many as before

    def endpoints(self) -> tuple[Endpoint, ...]:
        """The routes of the page and of its requests."""
        files = [Endpoint("GET", f"/inspect/{name}", self._file, is_open=True) for name in page_files()]
        return (
            Endpoint("GET", "/inspect", self._redirect, is_open=True),
            Endpoint("GET", "/inspect/", self._file, is_open=True),
            *files,
            Endpoint("GET", "/inspect/models", self._list_models, is_open=True),
            Endpoint("POST", "/inspect/look", self._answer_look),
            Endpoint("POST", "/inspect/cell", self._answer_cell),
        )

    def greet(self, address: str, log: Log) -> None:
        """Print where the page is, and open it if that is wanted."""
        log.say(f"look inside: {address}")
        if self._browse:
            webbrowser.open(address)

    def forget_models(self) -> None:
        """Load the models again at the next request."""
        self._models = {}

    def close(self) -> None:
        """Give up what the worker does."""
        self._given_up.set()
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def _redirect(self, call: Call) -> Response:
        return RedirectResponse("/inspect/", status_code=308)

    async def _file(self, call: Call) -> Response:
        name = call.request.url.path.removeprefix("/inspect/") or "inspect.html"
        return file_response(call, name, read_page_file(name).encode())

    async def _list_models(self, call: Call) -> Response:
        models = []
        for name, path in self._runs.items():
            settings = RunFolder.open(path).settings
            models.append(
                {"name": name, "kind": settings.model.kind, "task": settings.task, "together": self._together}
            )
        return json_response(models)

    async def _answer_look(self, call: Call) -> Response:
        asked = call.parse(LookRequest)
        return json_response(await self._answer(call, asked, lambda found: found.to_json(asked.values, asked.views)))

    async def _answer_cell(self, call: Call) -> Response:
        asked = call.parse(CellRequest)

        def cell(found: Inspection) -> dict[str, Any] | None:
            if asked.value not in found.arrays:
                raise SettingsError(f"value = {asked.value}: this model has no such value")
            return found.cell(asked.value, asked.index)

        return json_response(await self._answer(call, asked, cell))

    async def _answer(self, call: Call, asked: LookRequest, answer: Callable[[Inspection], ResultT]) -> ResultT:
        call.take_texts([asked.text, asked.target or ""])
        if asked.run not in self._runs:
            raise SettingsError(f"run = {asked.run}: not served here; allowed are {', '.join(self._runs)}")
        given_up = threading.Event()
        try:
            async with expiring(call.deadline()):
                return await asyncio.get_running_loop().run_in_executor(
                    self._worker, lambda: answer(self._look(asked, given_up))
                )
        finally:
            given_up.set()

    def _look(self, asked: LookRequest, given_up: threading.Event) -> Inspection:
        """Inspect a sentence, in the worker. Raises `ExpiredError` at the model's next pass after it was given up."""
        self._given_up = given_up
        model = self._model(asked.run)
        key = asked.model_dump(include=set(LookRequest.model_fields) - {"values", "views"})
        if model.last is None or model.last[0] != key:
            model.last = key, look(model.subject, asked.text, asked.target, prefix=asked.prefix, off=asked.off)
        return model.last[1]

    def _model(self, name: str) -> _Model:
        models = self._models
        if name not in models:
            subject = self._open(self._runs[name])
            for module in subject.model.modules():
                if isinstance(module, (TokenEmbedding, VectorEmbedding)):  # each pass begins there
                    # No bound method: the model is copied with its hooks, and the copy must not have a page.
                    module.register_forward_pre_hook(lambda *_: self._check_given_up())
            models[name] = _Model(subject)
        return models[name]

    def _check_given_up(self) -> None:
        if self._given_up.is_set():
            raise ExpiredError(EXPIRED)


def _use_one_thread() -> None:
    torch.set_num_threads(1)  # of this thread, and of threads that begin from now on
    torch.get_num_threads()  # a thread takes the number of the process when it first needs one: now


def named_runs(paths: Sequence[Path]) -> dict[str, Path]:
    """Run folders by name; of several with one name, by path."""
    names = [path.absolute().name for path in paths]
    return {name if names.count(name) == 1 else str(path): path for name, path in zip(names, paths, strict=True)}
