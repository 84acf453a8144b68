"""The access log, and stderr that does not block: a reader of the log that stalls must not stop the service."""

from __future__ import annotations

import io
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from transduce.logging import escape

_MOST_WAITING = 2000  # most waiting writes; further writes are dropped and counted
_LAST_SECONDS = 1.0  # timeout for the remaining text at the end


def log_request(
    route: str, status: int, seconds: float, n_characters: int, key: str, texts: Sequence[str], *, with_texts: bool
) -> None:
    """Print a line of JSON for a response. `key`: the name of the client's API key, if it has one."""
    line = {"time": round(time.time(), 3), "route": route, "status": status, "ms": round(1000 * seconds, 1)}
    line |= {"characters": n_characters} | ({"key": key} if key else {}) | ({"texts": texts} if with_texts else {})
    # written in one piece, because other threads write too
    sys.stderr.write(escape(json.dumps(line, ensure_ascii=False)) + "\n")


@contextmanager
def background_stderr() -> Iterator[None]:
    """Context in which a thread writes the output of `sys.stderr`.

    If the reader stalls, text is dropped, with a note.
    """
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
        """Write the remaining text, as far as the reader accepts it."""
        self._queue.put(None)
        self._thread.join(_LAST_SECONDS)

    def _run(self) -> None:
        while (text := self._queue.get()) is not None:
            data = text.encode("utf-8", "backslashreplace")
            with suppress(OSError):  # the reader has closed the pipe
                while data:  # written to the file descriptor: Python needs the stream's lock at exit
                    data = data[os.write(self._stream.fileno(), data) :]
