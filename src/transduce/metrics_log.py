"""Metrics for programs: `metrics.jsonl`, one JSON object a line."""

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
from transduce.runs.atomic import write_text

HISTORY = ("restart", "rollback")  # events that tell of a run's way, not of where it is


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line, each flushed as it is written.

    Numbers that are not finite become null, so that every line is JSON for any reader.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def append(self, event: Mapping[str, Any]) -> None:
        """Write one line; a full disk is a `RunFolderError`."""
        line = json.dumps(_finite(event), ensure_ascii=False, allow_nan=False)
        try:
            with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line + "\n")
        except OSError as error:
            raise RunFolderError(f"cannot write {self.path}: {error.strerror or error}") from None

    def mark(self) -> dict[str, Any]:
        """Put what is written on the disk; size and sha256 of it, to tell later whether lines were lost or changed."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
            return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": file.tell()}

    def begins_with(self, mark: Mapping[str, Any]) -> bool:
        """Whether the file still begins with what it was at `mark`."""
        with suppress(OSError), self.path.open("rb") as file:
            return hashlib.sha256(file.read(mark["size"])).hexdigest() == mark["sha256"]
        return False

    def read(self) -> list[dict[str, Any]]:
        """All events, without damaged lines and a last one that a killed run left unfinished. No file: none."""
        return self._read()[0]

    def truncate_after(self, update: int) -> list[str]:
        """Forget what was written after `update`, so that a resumed run repeats no line; and lines that are damaged.

        Restarts and rollbacks stay, whatever their update: they have happened. What comes back tells which lines were
        damaged.
        """
        events, damaged = self._read()
        kept = [event for event in events if event.get("update", 0) <= update or event["event"] in HISTORY]
        write_text(self.path, "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in kept))
        return [f"{self.path}, line {number}: damaged, left out" for number in damaged]

    def _read(self) -> tuple[list[dict[str, Any]], list[int]]:
        """The events, and the numbers of the lines that hold none."""
        try:
            lines = self.path.read_bytes().split(b"\n")[:-1]  # what follows the last line end was cut short
        except FileNotFoundError:
            return [], []
        except OSError as error:
            raise RunFolderError(f"cannot read {self.path}: {error.strerror or error}") from None
        events: list[dict[str, Any]] = []
        damaged = []
        for number, line in enumerate(lines, 1):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):  # not UTF-8, or not JSON
                event = None
            if isinstance(event, dict) and isinstance(event.get("event"), str) and type(event.get("update", 0)) is int:
                events.append(event)
            else:
                damaged.append(number)
        return events, damaged


class NoMetrics(MetricsFile):
    """For a process whose numbers another one writes down."""

    def mark(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def begins_with(self, mark: Mapping[str, Any]) -> bool:
        """It is for the other one to see."""
        return True

    def append(self, event: Mapping[str, Any]) -> None:
        """Nothing."""

    def read(self) -> list[dict[str, Any]]:
        """Nothing."""
        return []

    def truncate_after(self, update: int) -> list[str]:
        """Nothing."""
        return []


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
