"""Checksums: the manifest of a run folder, and those of the folders in it (checkpoints, encoded text).

A manifest.json lists sha256 and size of files as they were when they were written. It never lists a file that is about
to be replaced, so that a kill between two writes leaves no contradiction.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transduce
from transduce.config.settings import Settings
from transduce.errors import RunFolderError, SettingsError
from transduce.runs.atomic import advising, read_json, reading, write_json
from transduce.runs.identity import difference, with_changeable

Fingerprint = Mapping[str, Any]
"""`sha256` and `size` in bytes of a file."""

NAME, CONFIG = "manifest.json", "config.json"
FORMAT = 1
"""The format of run folders. Raise it if another version of transduce would misread them."""
RESTORE = "restore it from a copy of the run, or train again in another run folder"
"""Advice for a damaged or missing file of a run."""


def fingerprint(path: Path) -> dict[str, Any]:
    """Checksum and size of a file."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": path.stat().st_size}


def check_file(path: Path, expected: Fingerprint) -> None:
    """Compare a file with its entry in a manifest: first the size, then the content. Raises `RunFolderError`."""
    with reading(path):
        size = path.stat().st_size
        if size != expected.get("size"):
            raise RunFolderError(f"{path} is damaged: it has {size:,} bytes and should have {expected.get('size')}")
        found = fingerprint(path)
    if found["sha256"] != expected.get("sha256"):
        raise RunFolderError(f"{path} is damaged: its content does not match the checksum in the manifest")


def seal_folder(folder: Path) -> None:
    """Write a manifest of all files in `folder`, with those in its subfolders."""
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    write_json(folder / NAME, {"files": {name: fingerprint(folder / name) for name in names if name != NAME}})


def sealed_files(folder: Path, required: Iterable[str] = ()) -> Mapping[str, Fingerprint]:
    """The files in the manifest of a folder; a `RunFolderError` if it is damaged or lacks a `required` file."""
    manifest = read_json(folder / NAME)
    files: Any = manifest.get("files") if isinstance(manifest, dict) else None
    if isinstance(files, dict) and all(isinstance(was, dict) for was in files.values()) and {*required} <= {*files}:
        return files
    raise RunFolderError(f"{folder / NAME} is damaged: it does not list the files of the folder")


def check_sealed(folder: Path, *, required: Iterable[str] = ()) -> None:
    """Compare every file of a folder with its manifest; a `RunFolderError` names the first damaged one."""
    for name, expected in sealed_files(folder, required).items():
        check_file(folder / name, expected)


@dataclass
class Manifest:
    """manifest.json of a run folder: its format, the settings asked for, and checksums in two parts.

    `asked`: the settings that the run was asked for with, unset ones as null. `version`: the transduce that created the
    run. `files`: fingerprints of what the model needs; checked whenever the run is opened. `records`: of what describes
    the run; checked when it is read.
    """

    folder: Path
    asked: Mapping[str, Any]
    version: str = transduce.__version__
    files: dict[str, Fingerprint] = field(default_factory=dict)
    records: dict[str, Fingerprint] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a run folder; a `RunFolderError` if the folder is no run, damaged or of another format."""
        if not folder.is_dir():
            raise RunFolderError(f"there is no run folder {folder}; check its path")
        if not (folder / NAME).exists():
            raise RunFolderError(f"{folder} is no run folder: {NAME} is missing; name a folder that a training wrote")
        with advising(RESTORE):
            values = read_json(folder / NAME)
            if not _is_valid(values):
                raise RunFolderError(f"{folder / NAME} is damaged: it does not describe a run")
        _check_format(values.get("format"), folder)
        version = str(values.get("transduce", ""))
        return cls(folder, values["asked"], version=version, files=values["files"], records=values["records"])

    def asked_settings(self) -> Settings:
        """The settings that the run was asked for with. Raises `RunFolderError`."""
        return self._validated(self.asked)

    def require_same(self, asked: Settings) -> None:
        """Raise a `RunFolderError` if these settings, unset ones as None, make another run."""
        if found := difference(self.asked_settings(), asked):
            raise RunFolderError(
                f"{self.folder} contains another run: {found}; give the same settings to resume it, or name another "
                "run folder"
            )

    def settings(self) -> Settings:
        """The resolved settings of the run; changeable ones as they were asked for last. Raises `RunFolderError`."""
        path = self.folder / CONFIG
        if CONFIG not in self.files:
            raise RunFolderError(f"{self.folder} has no {CONFIG} yet: its training has not got that far; resume it")
        self.check(CONFIG)
        return with_changeable(self._validated(read_json(path)), self.asked_settings())

    def _validated(self, values: Mapping[str, Any]) -> Settings:
        try:
            return Settings.from_mapping(values, origin=str(self.folder))
        except SettingsError as error:
            raise RunFolderError(f"{error}; another version of transduce made the run: use that version") from error

    @property
    def tokenizers(self) -> dict[str, Fingerprint]:
        """The files of the vocabularies."""
        return {name: was for name, was in self.files.items() if name.startswith("tokenizer")}

    def save(self) -> None:
        """Write the manifest, in the current format."""
        listed = {"files": self.files, "records": self.records}
        write_json(self.folder / NAME, {"format": FORMAT, "transduce": self.version, "asked": self.asked, **listed})

    def add(self, part: dict[str, Fingerprint], *names: str) -> None:
        """List files, in `files` or `records`, as they are now."""
        part.update({name: fingerprint(self.folder / name) for name in names})
        self.save()

    @contextmanager
    def replacing(self, part: dict[str, Fingerprint], pattern: str) -> Iterator[None]:
        """List the files that match `pattern` as the body leaves them; while it replaces them they are not listed."""
        if old := fnmatch.filter(part, pattern):
            for name in old:
                del part[name]
            self.save()
        yield
        self.add(part, *sorted(path.name for path in self.folder.glob(pattern)))

    def check(self, prefix: str = "") -> None:
        """Compare the model's files whose names begin with `prefix` with their checksums. Raises `RunFolderError`."""
        with advising(RESTORE):
            for name, expected in self.files.items():
                if name.startswith(prefix):
                    check_file(self.folder / name, expected)


def _check_format(found: Any, path: Path) -> None:
    """Raise a `RunFolderError` unless this version can read a folder whose manifest at `path` names this format."""
    if type(found) is not int or found != FORMAT:
        is_newer = type(found) is int and found > FORMAT
        advice = "a newer version made it: install a newer transduce" if is_newer else "use the version that made it"
        raise RunFolderError(
            f"{path} has format {found!r}, and transduce {transduce.__version__} reads format {FORMAT}; {advice}"
        )


def _is_valid(values: Any) -> bool:
    if not isinstance(values, dict) or not isinstance(values.get("asked"), dict):
        return False
    parts = values.get("files"), values.get("records")
    return all(isinstance(part, dict) and all(map(_is_entry, part.items())) for part in parts)


def _is_entry(entry: tuple[str, Any]) -> bool:
    """Whether an entry has the plain name of a file, not a path that could lead out of the folder, and a checksum."""
    name, was = entry
    return name not in ("", ".", "..") and not {*name} & {"/", "\\", "\0"} and isinstance(was, dict)
