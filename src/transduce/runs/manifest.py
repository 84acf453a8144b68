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
from transduce.errors import RunFolderError
from transduce.runs.atomic import MOST_SETTINGS, read_json, reading, refuse_outside_links, write_json
from transduce.runs.format_version import FORMAT, check_format, upgraded

Fingerprint = Mapping[str, Any]
"""`sha256` and `size` in bytes of a file."""

NAME = "manifest.json"


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


def sealed_files(folder: Path, *, required: Iterable[str] = ()) -> Mapping[str, Fingerprint]:
    """The files in the manifest of a folder; a `RunFolderError` if it is damaged or lacks a `required` file."""
    manifest = read_json(folder / NAME, most=MOST_SETTINGS)
    files: Any = manifest.get("files") if isinstance(manifest, dict) else None
    if isinstance(files, dict) and all(isinstance(was, dict) for was in files.values()) and {*required} <= {*files}:
        if "format" in manifest:
            check_format(manifest["format"], folder)
        return files
    raise RunFolderError(f"{folder / NAME} is damaged: it does not list the files of the folder")


def check_sealed(folder: Path, *, required: Iterable[str] = ()) -> None:
    """Compare every file of a folder with its manifest; a `RunFolderError` names the first damaged one."""
    for name, expected in sealed_files(folder, required=required).items():
        check_file(folder / name, expected)


@dataclass
class Manifest:
    """manifest.json of a run folder: its format, the settings asked for, and checksums in two parts.

    `asked`: the settings that the run was asked for with, unset ones as null. `version`: the transduce that created the
    run. `config_format`: the format of config.json, which is not rewritten with the manifest. `files`: fingerprints of
    what the model needs; checked whenever the run is opened. `records`: of what describes the run; checked when it is
    read, none in a folder of an early version.
    """

    folder: Path
    asked: Mapping[str, Any]
    version: str = transduce.__version__
    config_format: int = FORMAT
    files: dict[str, Fingerprint] = field(default_factory=dict)
    records: dict[str, Fingerprint] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a run folder; a `RunFolderError` if the folder is no run, damaged or of another format."""
        if not folder.is_dir():
            raise RunFolderError(f"there is no run folder {folder}")
        if not (folder / NAME).exists():
            raise RunFolderError(f"{folder} is no run folder: {NAME} is missing")
        refuse_outside_links(folder)
        values = read_json(folder / NAME, most=MOST_SETTINGS)
        if not _is_valid(values):
            raise RunFolderError(f"{folder / NAME} is damaged: it does not describe a run")
        found = check_format(values.get("format"), folder)
        return cls(
            folder,
            upgraded(values["asked"], found),
            version=str(values.get("transduce", "")),
            config_format=check_format(values.get("config_format", found), folder),
            files=values["files"],
            records=values.get("records", {}),
        )

    def save(self) -> None:
        """Write the manifest, in the current format."""
        version = {"format": FORMAT, "config_format": self.config_format, "transduce": self.version}
        write_json(self.folder / NAME, {**version, "asked": self.asked, "files": self.files, "records": self.records})

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
        for name, expected in self.files.items():
            if name.startswith(prefix):
                check_file(self.folder / name, expected)


def _is_valid(values: Any) -> bool:
    if not isinstance(values, dict) or not isinstance(values.get("asked"), dict):
        return False
    parts = values.get("files"), values.get("records", {})
    return all(
        isinstance(part, dict) and all(_is_file_name(name) and isinstance(was, dict) for name, was in part.items())
        for part in parts
    )


def _is_file_name(name: str) -> bool:
    """Whether this is the plain name of a file, not a path that could lead out of the folder."""
    return bool(name) and name not in (".", "..") and not {*name} & {"/", "\\", "\0"}
