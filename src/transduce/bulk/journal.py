"""The output of one file of a bulk translation, and the journal that makes it resumable.

    OUT/NAME                         the translation of NAME, once it is complete
    OUT/.transduce/NAME.partial      the chunks so far, while it is incomplete
    OUT/.transduce/NAME.journal      a line of JSON with model, options and input, then a line per finished chunk

A chunk is synced to the disk before its line is written to the journal. Output beyond the last line, which a kill may
leave, is cut off when the translation resumes. Compressed output is one gzip member, xz stream or zstd frame per chunk,
so that it can be cut off too.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import lzma
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transduce.data.lines import zstd
from transduce.errors import DataError
from transduce.runs.atomic import sync, write_text

FOLDER = ".transduce"

_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".xz": lzma.compress,
    ".zst": zstd.compress,
}


@dataclass(frozen=True, slots=True)
class JournalPosition:
    """Progress in a file: translated lines, bytes of output, and bytes of input read. `done`: the file is complete."""

    lines: int = 0
    bytes: int = 0
    read: int = 0
    done: bool = False

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> JournalPosition | None:
        """Return the position in a line of the journal, or None if the line is damaged."""
        names_and_types = {name: type(value) for name, value in asdict(cls()).items()}
        valid = {name: type(value) for name, value in record.items()} == names_and_types and min(record.values()) >= 0
        return cls(**record) if valid else None


class OutputFile:
    """The output of one input file, complete or in progress."""

    def __init__(self, source: Path, output_dir: Path, how: Mapping[str, Any]) -> None:
        """Find the position at which to resume; writes nothing.

        `how`: all values that determine the translation, in JSON types. Raises `DataError` if the output is not that
        of a bulk translation, or was begun with another `how` or another input.
        """
        self.source, self.output = source, output_dir / source.name
        of_file = output_dir / FOLDER / source.name
        self._partial, self._journal = (of_file.with_name(f"{source.name}.{kind}") for kind in ("partial", "journal"))
        self._compress = _COMPRESS.get(source.suffix.lower(), bytes)
        self._header = {**how, "input": self._describe_input()}
        self.size: int = self._header["input"]["bytes"]
        self._journal_end = 0
        self._output_existed = os.path.lexists(self.output)
        self.position = self._find_position()
        self.was_done = self.position.done

    def append(self, rows: list[str], *, n_lines: int, read: int) -> None:
        """Write the translation of the next `n_lines` lines; `read`: bytes of the input up to their end."""
        before = self.position
        if before == JournalPosition():  # write the journal first: an old journal must never describe new output
            self._partial.touch()
            write_text(self._journal, f"{json.dumps(self._header)}\n")
            self._journal_end = self._journal.stat().st_size
        data = self._compress("".join(f"{row}\n" for row in rows).encode())
        end = _write(self._partial, before.bytes, data)
        self._record(JournalPosition(before.lines + n_lines, end, read))

    def finish(self) -> None:
        """Rename the complete output to its final name.

        Raises `DataError` if, in the meantime, the input was changed or another program wrote a file of that name.
        """
        if self._output_existed:
            return
        if os.path.lexists(self.output):
            raise self._foreign_output()
        if not self.position.done:
            if self.position.lines == 0:
                self.append([], n_lines=0, read=0)  # even an empty compressed stream has a few bytes
            if self._describe_input() != self._header["input"]:
                raise DataError(
                    f"{self.source} was changed while it was translated; remove {self._journal} to translate it again"
                )
            _write(self._partial, self.position.bytes, b"")
            self._record(replace(self.position, read=self.size, done=True))
        os.replace(self._partial, self.output)
        sync(self.output.parent)

    def _describe_input(self) -> dict[str, int]:
        stat = self.source.stat()
        return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}

    def _find_position(self) -> JournalPosition:
        """Return the last position in the journal up to which there is output."""
        if link := next((path for path in (self._partial, self._journal) if path.is_symlink()), None):
            raise DataError(f"{link} is a link and not a file of ours; remove it")
        written = self.output if self._output_existed else self._partial
        n_written = written.stat().st_size if written.is_file() else -1
        records = _read_records(self._journal)
        saved, self._journal_end = next(records, (None, 0))
        position = JournalPosition()
        for record, end in records:
            following = JournalPosition.from_record(record)
            if following is None or following.bytes > n_written:
                break
            position, self._journal_end = following, end
        complete = position.done and position.bytes == n_written
        if self._output_existed and not complete:
            raise self._foreign_output()
        if saved is None or not written.exists() or (position.done and not complete):  # new, or its output was removed
            return JournalPosition()
        self._check(saved)
        return position

    def _foreign_output(self) -> DataError:
        return DataError(
            f"{self.output} exists, and is not the complete translation of {self.source} by this command; remove it, "
            "or name another output_dir",
            "output_dir",
        )

    def _check(self, saved: Mapping[str, Any]) -> None:
        """Raise `DataError` if the journal is of another model, other options or another input."""
        differences = [
            {
                "input": f"another version of {self.source}, with another size or time of change",
                "run": "another model",
            }.get(name, f"{name} = {saved.get(name)!r} and not {value!r}")
            for name, value in self._header.items()
            if saved.get(name) != value
        ]
        if differences:
            begun, remove = ("made", self.output) if self.output.exists() else ("begun", self._journal)
            raise DataError(
                f"{self.output} was {begun} with {', '.join(differences)}; undo the change, name another output_dir, "
                f"or remove {remove} to translate the file again",
                "output_dir",
            )

    def _record(self, position: JournalPosition) -> None:
        line = f"{json.dumps(asdict(position))}\n"
        self._journal_end = _write(self._journal, self._journal_end, line.encode())
        self.position = position


def _write(path: Path, end: int, data: bytes) -> int:
    """Replace the content of a file after position `end` by `data`, sync it to the disk, and return the new end."""
    with path.open("r+b") as file:
        file.truncate(end)
        file.seek(end)
        file.write(data)
    sync(path)
    return end + len(data)


def _read_records(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the objects in a journal, each with the position of its end, up to an incomplete line."""
    end = 0
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            value = None
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(line)
            if not isinstance(value, dict) or not line.endswith(b"\n"):
                return
            end += len(line)
            yield value, end
