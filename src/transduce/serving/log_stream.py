"""Stderr that does not block: a reader of the log that stalls must not stop the service."""

from __future__ import annotations

import io
import os
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

_MOST_WAITING = 1 << 22  # characters; further text is dropped and counted
_LAST_SECONDS = 1.0  # for the reader to take the rest at the end


class _BackgroundStream(io.TextIOBase):
    """Writes from a thread. If the reader stalls, text is dropped, and replaced by a line that says so."""

    def __init__(self, stream: TextIO) -> None:
        stream.flush()
        self._stream = stream
        self._queue = queue.SimpleQueue[str | None]()
        self._lock = threading.Lock()
        self._n_waiting = 0  # characters
        self._n_dropped = 0  # writes
        self._thread = threading.Thread(target=self._run, name="stderr", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            if self._n_waiting + len(text) > _MOST_WAITING:
                self._n_dropped += 1
                return len(text)
            note = f"[{self._n_dropped} writes to the log were dropped]\n" if self._n_dropped else ""
            self._n_dropped = 0
            self._n_waiting += len(note + text)
        self._queue.put(note + text)
        return len(text)

    def flush(self) -> None:
        """Do nothing; the thread does not buffer."""

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
            with self._lock:
                self._n_waiting -= len(text)


@contextmanager
def background_stderr() -> Iterator[None]:
    """Write to `sys.stderr` from a thread inside the block, so that a stalled reader does not block the caller."""
    before = sys.stderr
    sys.stderr = stream = _BackgroundStream(before)
    try:
        yield
    finally:
        sys.stderr = before
        stream.end()
