"""Metrics for programs: `metrics.jsonl`, one JSON object per line."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transduce.errors import RunFolderError
from transduce.runs.atomic import reading, write_text

_LONGEST_LINE = 1 << 20  # bytes; parsing takes up to 20 times as much memory


class MetricsFile:
    """`metrics.jsonl`: one JSON object per line, each flushed when it is written.

    Numbers that are not finite become null, so that any JSON reader can read every line. `active` false, for worker
    ranks: nothing is read or written; the main process does that.
    """

    def __init__(self, path: Path, *, active: bool = True) -> None:
        self.path, self.active = Path(path), active

    def append(self, event: Mapping[str, Any]) -> None:
        """Write one line; a full disk is a `RunFolderError`."""
        if not self.active:
            return
        line = json.dumps(_finite(event), ensure_ascii=False, allow_nan=False)
        try:
            with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line + "\n")
        except OSError as error:
            raise RunFolderError(f"cannot write {self.path}: {error.strerror or error}") from None

    def mark(self) -> dict[str, Any]:
        """Sync the file to the disk; its size and sha256, for `begins_with`."""
        if not self.active:
            return {}
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
            return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": file.tell()}

    def begins_with(self, mark: Mapping[str, Any]) -> bool:
        """Whether the file still begins with its content at `mark`: no line was lost or changed since then."""
        if not self.active:
            return True
        with suppress(OSError), self.path.open("rb") as file:
            return hashlib.sha256(file.read(mark["size"])).hexdigest() == mark["sha256"]
        return False

    def read(self) -> list[dict[str, Any]]:
        """All events, without damaged lines and a last one that a kill cut short; none if there is no file."""
        return self._read()[0]

    def truncate_after(self, update: int, *, validated: bool = True) -> list[str]:
        """Remove events after `update`, so that a resumed run repeats no line, and damaged lines.

        `validated` false: also a validation of `update`, which will be repeated. All restarts are kept. Returns a note
        for each damaged line.
        """
        if not self.active:
            return []
        events, damaged = self._read()
        last = {"validation": update if validated else update - 1}
        kept = [e for e in events if e["event"] == "restart" or e.get("update", 0) <= last.get(e["event"], update)]
        write_text(self.path, "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in kept))
        return [f"{self.path}, line {number}: damaged, left out" for number in damaged]

    def _read(self) -> tuple[list[dict[str, Any]], list[int]]:
        """The events, and the numbers of damaged lines."""
        events: list[dict[str, Any]] = []
        damaged = []
        if not self.active or not self.path.exists():
            return [], []
        with reading(self.path), self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # a kill cut it short
                if (event := _parse(line)) is None:
                    damaged.append(number)
                else:
                    events.append(event)
        return events, damaged


def _parse(line: bytes) -> dict[str, Any] | None:
    """The event in a line; None if it is damaged."""
    try:
        event = json.loads(line) if len(line) <= _LONGEST_LINE else None
    except (ValueError, RecursionError):  # not UTF-8, or not JSON
        return None
    if isinstance(event, dict) and isinstance(event.get("event"), str) and type(event.get("update", 0)) is int:
        return event
    return None


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
