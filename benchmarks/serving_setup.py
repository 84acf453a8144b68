"""Shared code of the parts of serving.py: the server, the requests, the check of the answers and of the memory."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from http_load import Outcome
from memory import Sample, resident

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from servers import Server, request

CLIENTS = 64
BEAMS = (1, 2, 4)
TRANSLATE = "/v1/translate"


@dataclass(frozen=True, slots=True)
class Setup:
    """The models and requests of a measurement. expected: the offline translations by beam."""

    run: Path
    lines: list[str]
    expected: dict[int, list[str]]
    serve: list[str]
    scale: float

    def times(self, n: int, least: int) -> int:
        """A number of requests, scaled."""
        return max(least, round(n * self.scale))

    @contextmanager
    def server(self, *options: str) -> Iterator[Server]:
        """A server, whose log must have no traceback; killed if it does not end."""
        server = Server(f"en-de={self.run}", *self.serve, *options)
        try:
            yield server
        finally:
            if server.process.poll() is None and server.stop() != 0:
                print(f"FAILED: the server ended with {server.process.returncode}")
        if any("Traceback" in line for line in server.log):
            raise SystemExit("FAILED: a traceback in the log:\n" + "".join(server.log[-40:]))

    def single(self, number: int) -> bytes:
        """A request for one sentence with the run's beam."""
        return request(TRANSLATE, {"text": self.lines[number % len(self.lines)], "split": False})


def report(name: str, text: str, *, good: bool = True) -> bool:
    """Print a line of results."""
    print(f"{name}: {text}{'' if good else '  FAILED'}", flush=True)
    return good


def check_answers(setup: Setup, outcomes: list[Outcome], allowed: tuple[int, ...] = (200,)) -> list[Outcome]:
    """The answers with status 200, which are those of the offline translation; another status ends the program."""
    accepted = []
    for one in outcomes:
        if one.status not in allowed:
            raise SystemExit(f"FAILED: request {one.number} got status {one.status}: {one.body[:300]!r}")
        if one.status == 200:
            accepted.append(one)
            text = json.loads(one.body)["translations"][0]["text"]
            expected = setup.expected[0][one.number % len(setup.lines)]
            if text != expected:
                raise SystemExit(f"FAILED: request {one.number} got {text!r} instead of {expected!r}")
    return accepted


@contextmanager
def watch_memory(server: Server, done: Callable[[], int] = lambda: 0) -> Iterator[list[Sample]]:
    """Samples of the server's resident memory, five per second."""
    samples, stop, began = list[Sample](), threading.Event(), time.monotonic()

    def run() -> None:
        while True:  # at least once
            samples.append(Sample(time.monotonic() - began, resident(server.process.pid), done()))
            if stop.wait(0.2):
                break

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()
