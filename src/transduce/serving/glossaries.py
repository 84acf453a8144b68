"""Glossaries: terms and translations that clients define, kept in memory or in a file."""

from __future__ import annotations

import csv
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from filelock import FileLock, Timeout

from transduce.errors import RunFolderError, SettingsError, TransduceError
from transduce.runs.atomic import expecting, read_json, write_json
from transduce.text.languages import base_language

MOST_GLOSSARIES, MOST_ENTRIES, LONGEST_TERM = 100, 2000, 100


class UnknownGlossaryError(SettingsError):
    """There is no glossary with this id."""


class StorageError(TransduceError):
    """The file of the glossaries cannot be written. The glossaries have not changed."""


@dataclass(frozen=True, slots=True)
class Glossary:
    """Terms in the language `source` with their translations into `target`. `created`: time in ISO 8601, UTC."""

    id: str
    name: str
    source: str
    target: str
    created: str
    terms: Mapping[str, str]


class Glossaries:
    """All glossaries of a service, by their ids. Safe to use from several threads."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: a JSON file for the glossaries, which is made if missing, and locked while this object exists.

        Raises `UserError` if the file is damaged, not writable, or in use by another service.
        """
        self._path, self._changing = path, threading.Lock()
        self._known: dict[str, Glossary] = {}
        if path is None:
            return
        try:
            with tempfile.TemporaryFile(dir=path.parent):  # a new version is written next to the file
                pass
            self._file_lock = FileLock(f"{path}.lock")
            self._file_lock.acquire(blocking=False)
        except OSError as error:
            problem = "another service uses it" if isinstance(error, Timeout) else f"not writable ({error.strerror})"
            raise SettingsError(f"{path}: {problem}; give another file") from None
        if path.exists():
            with expecting(path):
                self._known = {fields["id"]: Glossary(**fields) for fields in read_json(path)["glossaries"]}

    def create(self, name: str, source: str, target: str, terms: Mapping[str, str]) -> Glossary:
        """Add a glossary.

        Raises:
            SettingsError: The glossary is empty or too large, or there are too many glossaries.
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
        glossary = Glossary(str(uuid4()), name, source.lower(), target.lower(), created, dict(terms))
        with self._changing:
            if len(self._known) >= MOST_GLOSSARIES:
                raise SettingsError(f"there are {MOST_GLOSSARIES:,} glossaries already; delete one")
            self._save({**self._known, glossary.id: glossary})
        return glossary

    def find(self, identity: str) -> Glossary:
        if identity not in self._known:
            raise UnknownGlossaryError(f"glossary_id '{identity[:40]}': there is no such glossary; create it first")
        return self._known[identity]

    def all(self) -> list[Glossary]:
        return list(self._known.values())

    def delete(self, identity: str) -> None:
        """Remove a glossary. Raises `UnknownGlossaryError`, or `StorageError` if the file cannot be written."""
        with self._changing:
            removed = self.find(identity)
            self._save({key: glossary for key, glossary in self._known.items() if glossary is not removed})

    def _save(self, known: dict[str, Glossary]) -> None:
        if self._path is not None:
            try:
                write_json(self._path, {"glossaries": [asdict(glossary) for glossary in known.values()]})
            except (OSError, RunFolderError) as error:
                reason = getattr(error.__cause__ or error, "strerror", None) or error
                raise StorageError(f"the glossaries cannot be saved ({reason}); nothing has changed") from error
        self._known = known

    def terms(self, identity: str, source: str, target: str) -> Mapping[str, str]:
        """The terms of a glossary. Raises `SettingsError` if it does not exist or is for other languages."""
        glossary = self.find(identity)
        for wanted, has in ((source, glossary.source), (target, glossary.target)):
            if base_language(wanted) != base_language(has):
                raise SettingsError(
                    f"glossary '{glossary.name[:40]}' is for {glossary.source}-{glossary.target}, not {source}-{target}"
                )
        return glossary.terms


def parse_entries(text: str, separator: str) -> dict[str, str]:
    """Parse a table with a term and its translation per line. Further columns are ignored."""
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
