"""The access log, and stderr that does not block: a reader of the log that stalls must not stop the service."""

from __future__ import annotations

import asyncio
import io
import json
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from transduce.logging import escape

_SECONDS = 1.0
_REFUSED = 429
_MOST_WAITING = 2000  # writes; further ones are dropped and counted
_LAST_SECONDS = 1.0  # for the reader to take the rest at the end


class AccessLog:
    """Prints a line of JSON per request, and one per second and route for those that are refused under load."""

    def __init__(self, *, with_texts: bool) -> None:
        self._with_texts = with_texts
        self._refused = Counter[str]()

    def write(self, route: str, status: int, seconds: float, n_characters: int, key: str, texts: Sequence[str]) -> None:
        """Log a response. `key`: the name of the client's API key, if it has one."""
        if status == _REFUSED:
            if not self._refused:
                asyncio.get_running_loop().call_later(_SECONDS, self.flush)
            self._refused[route] += 1
            return
        line = {"route": route, "status": status, "ms": round(1000 * seconds, 1), "characters": n_characters}
        _print(line | ({"key": key} if key else {}) | ({"texts": texts} if self._with_texts else {}))

    def flush(self) -> None:
        """Print the refusals that have not been printed yet."""
        for route, n in self._refused.items():
            _print({"route": route, "status": _REFUSED, "requests": n})
        self._refused.clear()


def _print(line: dict[str, Any]) -> None:
    text = json.dumps({"time": round(time.time(), 3), **line}, ensure_ascii=False)
    sys.stderr.write(escape(text) + "\n")  # in one piece: others write too


@contextmanager
def background_stderr() -> Iterator[None]:
    """Inside, a thread writes what is written to `sys.stderr`. If the reader stalls, text is dropped, with a note."""
    before, stream = sys.stderr, _BackgroundStream()
    sys.stderr = stream
    try:
        yield
    finally:
        sys.stderr = before
        stream.end()


class _BackgroundStream(io.TextIOBase):
    def __init__(self) -> None:
        self._stream = sys.stderr
        self._stream.flush()
        self._queue = queue.SimpleQueue[str | None]()
        self._n_dropped = 0
        self._thread = threading.Thread(target=self._run, name="stderr", daemon=True)
        self._thread.start()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def write(self, text: str) -> int:
        if self._queue.qsize() >= _MOST_WAITING:
            self._n_dropped += 1
        else:
            note = f"[{self._n_dropped} writes to the log were dropped]\n" if self._n_dropped else ""
            self._n_dropped = 0
            self._queue.put(note + text)
        return len(text)

    def end(self) -> None:
        """Write the rest, as far as the reader takes it."""
        self._queue.put(None)
        self._thread.join(_LAST_SECONDS)

    def _run(self) -> None:
        while (text := self._queue.get()) is not None:
            data = text.encode("utf-8", "backslashreplace")
            with suppress(OSError):  # the reader has closed the pipe
                while data:  # not by the stream, whose lock Python needs at its exit
                    data = data[os.write(self._stream.fileno(), data) :]
