"""Glossaries: terms and their translations, which clients create. Kept in memory, or in a file.

Several processes may share a file. A change is made to what the file has then, under a lock, and every other process
reads the file again when it has changed.
"""

from __future__ import annotations

import csv
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from filelock import FileLock, Timeout

from transduce.errors import RunFolderError, SettingsError, TransduceError
from transduce.logging import print_to_stderr
from transduce.runs.atomic import expecting, read_json, write_json
from transduce.serving.sentences import base_language

_LOCK_SECONDS = 10.0  # for the changes of other processes, each of which writes the file
MOST_GLOSSARIES, MOST_ENTRIES, LONGEST_TERM = 100, 2000, 100


class StorageError(TransduceError):
    """The file of the glossaries cannot be written; nothing has changed."""


@dataclass(frozen=True, slots=True)
class Glossary:
    """Terms of one language with their translations into another. `created`: ISO 8601, UTC."""

    id: str
    name: str
    source: str
    target: str
    created: str
    terms: Mapping[str, str]


class Glossaries:
    """All glossaries of a service, by their ids. Safe to use from several threads.

    The methods read the file if it has changed; call them outside the event loop.
    """

    def __init__(self, path: Path | None = None) -> None:
        """`path`: a JSON file that keeps them, which need not exist. Raises `UserError`: damaged, or not writable."""
        self._path, self._lock = path, threading.Lock()
        self._state: tuple[_Version, dict[str, Glossary]] = None, {}
        self._problem = ""
        if path is None:
            return
        if path.exists():
            self._read(path)
        try:
            with tempfile.TemporaryFile(dir=path.parent):  # a new version is written next to the file
                pass
        except OSError as error:
            raise SettingsError(
                f"{path}: {path.parent} is not writable ({error.strerror}); give another file"
            ) from None

    def create(self, name: str, source: str, target: str, terms: Mapping[str, str]) -> Glossary:
        """Add a glossary.

        Raises:
            SettingsError: It is empty or too large, or there are too many.
            StorageError: The file cannot be written.
        """
        if not terms or len(terms) > MOST_ENTRIES:
            raise SettingsError(f"entries: {len(terms):,}; a glossary has from 1 to {MOST_ENTRIES:,}")
        for text in (*terms, *terms.values()):
            if len(text.splitlines()) != 1 or "\t" in text or len(text) > LONGEST_TERM:
                raise SettingsError(
                    f"entries: {text[:40]!r}: a term has from 1 to {LONGEST_TERM} characters and one line"
                )
        created = datetime.now(UTC).isoformat(timespec="microseconds")
        one = Glossary(str(uuid4()), name, source.lower(), target.lower(), created, dict(terms))
        with self._changing() as known:
            if len(known) >= MOST_GLOSSARIES:
                raise SettingsError(f"there are {MOST_GLOSSARIES:,} glossaries already; delete one")
            known[one.id] = one
        return one

    def find(self, identity: str) -> Glossary | None:
        """A glossary by its id."""
        return self._current().get(identity)

    def all(self) -> list[Glossary]:
        """All of them, oldest first."""
        return list(self._current().values())

    def delete(self, identity: str) -> bool:
        """Remove a glossary; False if there is none of this id. Raises `StorageError`: the file cannot be written."""
        if identity not in self._current():
            return False
        with self._changing() as known:
            return known.pop(identity, None) is not None

    def terms(self, identity: str, source: str, target: str) -> Mapping[str, str]:
        """The terms of a glossary for these languages. Raises `SettingsError`: there is none."""
        one = self.find(identity)
        if one is None:
            raise SettingsError(f"glossary_id '{identity[:40]}': there is no such glossary; create it first")
        for wanted, has in ((source, one.source), (target, one.target)):
            if base_language(wanted) != base_language(has):
                raise SettingsError(
                    f"glossary '{one.name[:40]}' is for {one.source}-{one.target}, not {source}-{target}"
                )
        return one.terms

    def _current(self) -> dict[str, Glossary]:
        """The glossaries now. If the file cannot be read, they stay as they were, and a line on stderr says so once."""
        problem = ""
        try:
            if self._path is not None:
                self._read(self._path)
        except (OSError, RunFolderError) as error:
            problem = f"the glossaries stay as they were: {error}"
            if problem != self._problem:
                print_to_stderr(problem)
        self._problem = problem
        return self._state[1]

    def _read(self, path: Path) -> dict[str, Glossary]:
        version = _version(path)  # before: if it is replaced meanwhile, it is read again
        if version != self._state[0]:
            with expecting(path):
                self._state = version, {one["id"]: Glossary(**one) for one in read_json(path)["glossaries"]}
        return self._state[1]

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Glossary]]:
        """The glossaries, of which the block changes a copy; then they are saved."""
        if self._path is None:
            with self._lock:
                known = dict(self._state[1])
                yield known
                self._state = None, known
            return
        try:
            self._path.parent.stat()  # FileLock would create it
            with FileLock(f"{self._path}.lock", timeout=_LOCK_SECONDS):
                known = dict(self._read(self._path) if self._path.exists() else self._state[1])
                yield known
                write_json(self._path, {"glossaries": [asdict(one) for one in known.values()]})
                self._state = _version(self._path), known
        except Timeout:
            raise StorageError("other processes are changing the glossaries; nothing has changed; try again") from None
        except (OSError, RunFolderError) as error:
            reason = getattr(error.__cause__ or error, "strerror", None) or "their file is damaged"
            raise StorageError(f"the glossaries cannot be saved ({reason}); nothing has changed") from error


_Version = tuple[int, int, int] | None


def _version(path: Path) -> _Version:
    """Changes when a file is replaced."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def parse_entries(text: str, separator: str) -> dict[str, str]:
    """Entries of a table, a line each: term, translation, and what else there may be."""
    entries: dict[str, str] = {}
    try:
        lines = [line.split("\t") for line in text.splitlines()]
        if separator == ",":
            lines = list(csv.reader(text.splitlines(keepends=True)))
    except csv.Error as error:
        raise SettingsError(f"entries: not a table of comma-separated values ({error})") from None
    for number, row in enumerate(lines, 1):
        cells = [cell.strip() for cell in row]
        if not any(cells):
            continue
        if len(cells) < 2 or cells[0] in entries:
            problem = "a term twice" if len(cells) > 1 else "not a term and its translation"
            raise SettingsError(f"entries, line {number}: {problem}")
        entries[cells[0]] = cells[1]
    return entries
