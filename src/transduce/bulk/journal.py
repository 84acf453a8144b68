"""The output of one file of a bulk translation, and the journal that makes it resumable.

    OUT/NAME                         the translation of NAME, once it is complete
    OUT/.transduce/NAME.partial      its first chunks
    OUT/.transduce/NAME.journal      one line about model, options and input, then one per finished chunk

A chunk is on the disk before its line in the journal is. What a kill leaves beyond the last line is cut off when the
translation resumes. Compressed output is one gzip member, xz stream or zstd frame per chunk, so that it can be cut too.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

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
    """The progress in a file: translated lines, bytes of the output and their CRC-32, bytes read of the input.

    `done`: to its end.
    """

    lines: int = 0
    bytes: int = 0
    checksum: int = 0
    read: int = 0
    done: bool = False


class Shard:
    """A file to translate and its output, as far as it is written."""

    def __init__(self, source: Path, output_dir: Path, how: Mapping[str, Any]) -> None:
        """Find out how far the file is; writes nothing.

        `how`: everything that the translation depends on, for JSON. Raises `DataError`: the output exists and is not
        ours, or was begun with another `how` or another input.
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
        """Write the translation of the next `n_lines` lines; `read`: bytes of the input that end with them."""
        before = self.position
        if before == JournalPosition():  # before the output is written: an old journal must not describe a new output
            self._partial.touch()
            write_text(self._journal, _as_line(self._header))
            self._journal_end = self._journal.stat().st_size
        data = self._compress("".join(f"{row}\n" for row in rows).encode())
        end = _write(self._partial, before.bytes, data)
        self._record(JournalPosition(before.lines + n_lines, end, zlib.crc32(data, before.checksum), read))

    def finish(self) -> None:
        """Give the complete output its name.

        Raises `DataError` if the input was changed or another program has written the output meanwhile.
        """
        if self._output_existed:
            return
        if os.path.lexists(self.output):
            raise self._foreign_output()
        if not self.position.done:
            if self.position.lines == 0:
                self.append([], n_lines=0, read=0)  # compressed, nothing is a few bytes
            if self._describe_input() != self._header["input"]:
                raise DataError(
                    f"{self.source} was changed while it was translated; remove {self._journal} to translate it again"
                )
            _write(self._partial, self.position.bytes, b"")
            self._record(replace(self.position, read=self.size, done=True))
        os.replace(self._partial, self.output)
        sync(self.output.parent)

    def _describe_input(self) -> dict[str, int]:
        found = self.source.stat()
        return {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns}

    def _find_position(self) -> JournalPosition:
        """The resume position: the last line of the journal up to which the output is undamaged."""
        if link := next((path for path in (self._partial, self._journal) if path.is_symlink()), None):
            raise DataError(f"{link} is a link and not a file of ours; remove it")
        written, complete = self.output if self._output_existed else self._partial, False
        records = _read_records(self._journal)
        saved, self._journal_end = next(records, (None, 0))
        position = JournalPosition()
        if written.is_file():
            with written.open("rb") as file:
                for value, end in records:
                    found = _as_position(value)
                    if found is None or not _follows(file, position, found):
                        break
                    position, self._journal_end = found, end
                complete = position.done and not file.read(1)
        if self._output_existed and not complete:
            raise self._foreign_output()
        if saved is None or not written.exists() or (position.done and not complete):  # new, or its output was removed
            return JournalPosition()
        self._check(saved)
        return position

    def _foreign_output(self) -> DataError:
        return DataError(
            f"{self.output} exists, and is not the complete translation of {self.source} by this command; remove it, "
            "or name another output_dir"
        )

    def _check(self, saved: Mapping[str, Any]) -> None:
        """Refuse to mix the output of two models, options or inputs. Raises `DataError`."""
        other = [
            {"input": f"another version of {self.source}", "run": "another model"}.get(
                name, f"{name} = {saved.get(name)!r} and not {value!r}"
            )
            for name, value in self._header.items()
            if saved.get(name) != value
        ]
        if other:
            begun, remove = ("made", self.output) if self.output.exists() else ("begun", self._journal)
            raise DataError(
                f"{self.output} was {begun} with {', '.join(other)}; undo the change, name another output_dir, or "
                f"remove {remove} to translate the file again"
            )

    def _record(self, position: JournalPosition) -> None:
        self._journal_end = _write(self._journal, self._journal_end, _as_line(asdict(position)).encode())
        self.position = position


def _follows(file: IO[bytes], before: JournalPosition, after: JournalPosition) -> bool:
    """Whether the file, read up to `before`, continues as it was written up to `after`."""
    n = after.bytes - before.bytes
    data = file.read(max(0, n))
    return len(data) == n and zlib.crc32(data, before.checksum) == after.checksum


def _write(path: Path, end: int, data: bytes) -> int:
    """Write data to the disk as the end of a file, whose content before it ends at `end`; return the new end."""
    with path.open("r+b") as file:
        file.truncate(end)
        file.seek(end)
        file.write(data)
    sync(path)
    return end + len(data)


def _as_line(value: Mapping[str, Any]) -> str:
    """A line of a journal: a checksum and JSON, so that damage does not look like another position."""
    text = json.dumps(value)
    return f"{zlib.crc32(text.encode()):08x} {text}\n"


def _read_records(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The objects in the whole lines of a journal up to the first damaged one, each with the position of its end."""
    end = 0
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            checksum, _, text = line.removesuffix(b"\n").partition(b" ")
            if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
                return
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):  # not ours, in spite of the checksum
                return
            if not isinstance(value, dict):
                return
            end += len(line)
            yield value, end


def _as_position(value: Mapping[str, Any]) -> JournalPosition | None:
    types = {"lines": int, "bytes": int, "checksum": int, "read": int, "done": bool}
    if {name: type(one) for name, one in value.items()} != types or min(value.values()) < 0:
        return None
    return JournalPosition(**value)
