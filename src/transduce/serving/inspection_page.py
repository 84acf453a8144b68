"""The page that shows the inside of the runs, at /inspect, and the requests that it makes."""

from __future__ import annotations

import asyncio
import hashlib
import webbrowser
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import RedirectResponse, Response

from transduce.errors import SettingsError
from transduce.inspection.look import Inspection, look
from transduce.inspection.page import page_files, read_page_file
from transduce.inspection.subjects import Subject, open_subject
from transduce.logging import Log
from transduce.serving.concurrency import expiring
from transduce.serving.http import Call, Endpoint, json_response
from transduce.serving.web_page import HEADERS, TYPES

ResultT = TypeVar("ResultT")
Text = Annotated[str, Field(strict=True, max_length=10_000)]
Names = Annotated[list[str], Field(max_length=4096)]


class LookRequest(BaseModel):
    """What to look at: a sentence of a run, with parts switched off. values: parts whose matrices are wanted."""

    model_config = ConfigDict(extra="forbid")
    run: str
    text: Text
    target: Text | None = None
    prefix: Annotated[list[int], Field(max_length=4096)] = []
    off: Names = []
    values: Names = []


class CellRequest(LookRequest):
    """One cell of a value."""

    value: str
    index: Annotated[list[int], Field(max_length=8)]


class InspectionPage:
    """Serves the page for runs of any task. Their models are loaded with PyTorch when they are first looked at."""

    def __init__(
        self, runs: Mapping[str, Path], *, device: str = "auto", together: bool = False, browse: bool = False
    ) -> None:
        """`together`: the page shows all runs side by side. `browse`: open it in a browser."""
        self._runs, self._device, self._together, self._browse = runs, device, together, browse
        self._subjects: dict[str, Subject] = {}
        self._last: tuple[Any, Inspection] | None = None  # the page asks for cells of what it shows
        # One sentence at a time, with one thread: small products gain nothing from two, and where other processes are
        # busy, the threads of OpenMP wait for one another.
        self._worker = ThreadPoolExecutor(1, "inspect", initializer=_use_one_thread)

    def endpoints(self) -> tuple[Endpoint, ...]:
        """The routes of the page and of its requests."""
        files = [Endpoint("GET", f"/inspect/{name}", self._file, is_open=True) for name in page_files()]
        return (
            Endpoint("GET", "/inspect", self._redirect, is_open=True),
            Endpoint("GET", "/inspect/", self._file, is_open=True),
            *files,
            Endpoint("GET", "/inspect/models", self._models, is_open=True),
            Endpoint("POST", "/inspect/look", self._look),
            Endpoint("POST", "/inspect/cell", self._cell),
        )

    def greet(self, address: str, log: Log) -> None:
        """Print where the page is, and open it if that is wanted."""
        log.say(f"look inside: {address}")
        if self._browse:
            webbrowser.open(address)

    async def _redirect(self, call: Call) -> Response:
        return RedirectResponse("/inspect/", status_code=308)

    async def _file(self, call: Call) -> Response:
        name = call.request.url.path.removeprefix("/inspect/") or "inspect.html"
        content = read_page_file(name).encode()
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        headers = {**HEADERS, "etag": tag}
        if call.header("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=TYPES[name.rpartition(".")[2]])

    async def _models(self, call: Call) -> Response:
        models = []
        for name in self._runs:
            subject = await self._subject(name)
            assert subject.folder is not None
            settings = subject.folder.settings
            models.append(
                {"name": name, "kind": settings.model.kind, "task": settings.task, "together": self._together}
            )
        return json_response(models)

    async def _look(self, call: Call) -> Response:
        asked = call.parse(LookRequest)
        found = await self._inspection(call, asked)
        return json_response(await self._run(found.to_json, asked.values))

    async def _cell(self, call: Call) -> Response:
        asked = call.parse(CellRequest)
        found = await self._inspection(call, asked)
        if asked.value not in found.arrays:
            raise SettingsError(f"value = {asked.value}: this model has no such value")
        return json_response(found.cell(asked.value, asked.index))

    async def _inspection(self, call: Call, asked: LookRequest) -> Inspection:
        call.take_texts([asked.text, asked.target or ""])
        key = asked.model_dump(include=set(LookRequest.model_fields) - {"values"})
        async with expiring(call.deadline()):
            subject = await self._subject(asked.run)
            return await self._run(self._look_once, subject, asked, key)

    def _look_once(self, subject: Subject, asked: LookRequest, key: Any) -> Inspection:
        if self._last is None or self._last[0] != key:
            found = look(subject, asked.text, asked.target, prefix=asked.prefix, off=asked.off)
            self._last = key, found
        return self._last[1]

    def _run(self, work: Callable[..., ResultT], *arguments: Any) -> Awaitable[ResultT]:
        return asyncio.get_running_loop().run_in_executor(self._worker, work, *arguments)

    async def _subject(self, name: str) -> Subject:
        if name not in self._runs:
            raise SettingsError(f"run = {name}: not served here; allowed are {', '.join(self._runs)}")
        if name not in self._subjects:
            self._subjects[name] = await self._run(partial(open_subject, self._runs[name], device=self._device))
        return self._subjects[name]


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)  # of this thread


def named_runs(paths: Sequence[Path]) -> dict[str, Path]:
    """Run folders by name; of several with one name, by path."""
    names = [path.absolute().name for path in paths]
    return {name if names.count(name) == 1 else str(path): path for name, path in zip(names, paths, strict=True)}
