"""Checksums: the manifest of a run folder, and the manifests of folders in it (checkpoints, encoded text).

A manifest.json lists the sha256 and size that files had when they were written. It never lists a file that is about to
be replaced, so that a kill between two writes leaves no contradiction.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, TypeAdapter

import transduce
from transduce.config.extensions import PREFIX, load_extensions
from transduce.config.settings import Settings
from transduce.errors import RunFolderError, SettingsError
from transduce.runs.atomic import advising, expecting, read_json, reading, write_json

Fingerprint = Mapping[str, Any]
"""The `sha256` of a file and its `size` in bytes."""
FileName = Annotated[str, Field(pattern=r"^[^./\\\x00][^/\\\x00]*$")]
"""The plain name of a file, which cannot lead out of its folder."""

NAME, CONFIG, WEIGHTS = "manifest.json", "config.json", "model.safetensors"
FORMAT = 1
"""The format of run folders. Raise it if another version of transduce would misread them."""
RESTORE = "restore it from a copy of the run, or train again in another run folder"
"""Advice for a damaged or missing file of a run."""


def fingerprint(path: Path) -> dict[str, Any]:
    """Compute the checksum and the size of a file."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": path.stat().st_size}


def check_file(path: Path, expected: Fingerprint) -> None:
    """Compare a file with its entry in a manifest: first the size, then the content. Raises `RunFolderError`."""
    with reading(path):
        size = path.stat().st_size
        if size != expected.get("size"):
            raise RunFolderError(f"{path} is damaged: it has {size:,} bytes and should have {expected.get('size')}")
        actual = fingerprint(path)
    if actual["sha256"] != expected.get("sha256"):
        raise RunFolderError(f"{path} is damaged: its content does not match the checksum in the manifest")


def seal_folder(folder: Path) -> None:
    """Write a manifest of all files in `folder` and its subfolders."""
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    write_json(folder / NAME, {"files": {name: fingerprint(folder / name) for name in names if name != NAME}})


def sealed_files(folder: Path, required: Iterable[str] = ()) -> Mapping[str, Fingerprint]:
    """Read the manifest of a folder; raise `RunFolderError` if it is damaged or lacks a `required` file."""
    manifest = read_json(folder / NAME)
    files: Any = manifest.get("files") if isinstance(manifest, dict) else None
    if isinstance(files, dict) and all(isinstance(was, dict) for was in files.values()) and {*required} <= {*files}:
        return files
    raise RunFolderError(f"{folder / NAME} is damaged: it does not list the files of the folder")


def check_sealed(folder: Path, *, required: Iterable[str] = ()) -> None:
    """Compare every file of a folder with its manifest; raise `RunFolderError` with the name of a damaged file."""
    for name, expected in sealed_files(folder, required).items():
        check_file(folder / name, expected)


@dataclass(frozen=True)
class Change:
    """Settings that a command has changed since the run began: the values before and after, by dotted name.

    `continues`: the command continued a finished training.
    """

    settings: Mapping[str, tuple[Any, Any]]
    continues: bool = False


@dataclass
class Manifest:
    """The content of manifest.json in a run folder: format, requested settings, their changes, and checksums.

    `asked`: the requested settings, null if unset. `version`: the version of transduce that created the run. `files`:
    fingerprints of the files that the model needs, checked whenever the run is opened. `records`: fingerprints of
    records of the run, checked when the records are read. `changes`: changed settings, oldest first.
    """

    folder: Path
    asked: Mapping[str, Any]
    version: str = transduce.__version__
    files: dict[FileName, Fingerprint] = field(default_factory=dict)
    records: dict[FileName, Fingerprint] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read a run folder's manifest; raise `RunFolderError` if it is no run, damaged or of another format."""
        if not folder.is_dir():
            raise RunFolderError(f"there is no run folder {folder}; check its path")
        if not (folder / NAME).exists():
            raise RunFolderError(f"{folder} is no run folder: {NAME} is missing; name a folder that a training wrote")
        with advising(RESTORE, "run"), expecting(folder / NAME):
            values = read_json(folder / NAME)
            found = values["format"]
            if found == FORMAT:
                fields = {**values, "folder": folder, "version": values["transduce"]}
                return TypeAdapter(cls).validate_python(fields)
        is_newer = isinstance(found, int) and found > FORMAT
        advice = "a newer version made it: install a newer transduce" if is_newer else "use the version that made it"
        raise RunFolderError(
            f"{folder} has format {found!r}, and transduce {transduce.__version__} reads format {FORMAT}; {advice}"
        )

    def asked_settings(self) -> Settings:
        """Return the requested settings of the run. Raises `RunFolderError` if they are damaged."""
        return self._validated(self.asked)

    def require_same(self, asked: Settings, *, but: Collection[str] = ("freely",)) -> None:
        """Raise `RunFolderError` if the requested settings `asked` are the settings of another run.

        `but`: kinds of changeable settings that may differ (`Traits.changeable`).
        """
        # `training.device` identifies a run, too: another order of summation rounds differently.
        kinds = {"", "freely", "recorded"} - {*but}
        before, now = (dict(_leaves(_values(settings, *kinds))) for settings in (self.asked_settings(), asked))
        for name in before | now:
            if before.get(name) != now.get(name):
                values = (json.dumps(leaves.get(name), ensure_ascii=False) for leaves in (before, now))
                in_folder, here = ("unset" if value == "null" else value for value in values)
                raise RunFolderError(
                    f"{self.folder} contains another run: {name} is {in_folder} in the folder and {here} here; give "
                    "the same settings to resume it, or name another run folder",
                    *(name, "run"),
                )

    def requested_changes(self, asked: Settings) -> dict[str, tuple[Any, Any]]:
        """Return the settings of the kind "recorded" to which `asked` gives a new value: values before and after.

        Unset settings are left out. So are settings that the last command set to the same value, even if a continuation
        of the run has changed them since.
        """
        last, current, now = (_values(s, "recorded") for s in (self.asked_settings(), self.settings(), asked))
        given = asked.model_dump(mode="json", exclude_unset=True)
        return {
            name: (current[name], value)
            for name, value in now.items()
            if name.partition(".")[2] in given.get(name.partition(".")[0], ())
            and value not in (last[name], current[name])
        }

    @property
    def n_continuations(self) -> int:
        """The number of times that the training was continued after its end."""
        return sum(change.continues for change in self.changes)

    def settings(self) -> Settings:
        """Return the resolved settings of the run, with the latest values of changeable settings; load its extensions.

        Raises `RunFolderError` if a file is damaged, and `SettingsError` if the user does not allow the extensions.
        """
        path = self.folder / CONFIG
        if CONFIG not in self.files:
            raise RunFolderError(f"{self.folder} has no {CONFIG} yet: its training has not got that far; resume it")
        self.check(CONFIG)
        settings = self._validated(read_json(path))
        settings = replace_settings(settings, _values(self.asked_settings(), "freely"))
        for change in self.changes:
            settings = replace_settings(settings, {name: after for name, (_, after) in change.settings.items()})
        copies = tuple(self.folder / name for name in self.files if name.startswith(PREFIX))
        self.check(PREFIX)
        load_extensions(copies)
        return settings.model_copy(update={"extensions": copies})

    def _validated(self, values: Mapping[str, Any]) -> Settings:
        try:
            return Settings.from_mapping(values, origin=str(self.folder))
        except SettingsError as error:
            raise RunFolderError(f"{error}; another version of transduce made the run: use that version") from error

    @property
    def tokenizers(self) -> dict[str, Fingerprint]:
        return {name: was for name, was in self.files.items() if name.startswith("tokenizer")}

    def save(self) -> None:
        """Write the manifest, in the current format."""
        values = {"format": FORMAT, "transduce": self.version, "asked": self.asked, "files": self.files}
        write_json(self.folder / NAME, {**values, "records": self.records, "changes": [*map(asdict, self.changes)]})

    def add(self, part: dict[str, Fingerprint], *names: str) -> None:
        """Add the current fingerprints of files to `files` or `records`."""
        part.update({name: fingerprint(self.folder / name) for name in names})
        self.save()

    @contextmanager
    def replacing(self, part: dict[str, Fingerprint], pattern: str) -> Iterator[None]:
        """Context manager for replacing files that match `pattern`; meanwhile the manifest does not list them."""
        if old := fnmatch.filter(part, pattern):
            for name in old:
                del part[name]
            self.save()
        yield
        self.add(part, *sorted(path.name for path in self.folder.glob(pattern)))

    def check(self, prefix: str = "") -> None:
        """Compare the model's files whose names begin with `prefix` with their checksums. Raises `RunFolderError`.

        The weights are compared when they are loaded.
        """
        with advising(RESTORE, "run"):
            for name, expected in self.files.items():
                if name.startswith(prefix) and name != WEIGHTS:
                    check_file(self.folder / name, expected)


def replace_settings(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Return the settings with some values replaced, given by dotted name."""
    nested = settings.model_dump(mode="json")
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        (nested[section] if section else nested)[key] = value
    return Settings.from_mapping(nested)


def _values(settings: Settings, *kinds: str) -> dict[str, Any]:
    """Return the values of the settings with `Traits.changeable` of these kinds, by dotted name."""
    nested = settings.model_dump(mode="json")
    names = [name.rpartition(".") for name, traits in settings.traits() if traits.changeable in kinds]
    return {section + dot + key: (nested[section] if dot else nested)[key] for section, dot, key in names}


def format_changes(settings: Mapping[str, Sequence[Any]]) -> str:
    """Format changed settings, given as values before and after, in a line.

    >>> format_changes({"training.lr": (0.001, 0.0005), "training.max_updates": (None, 90)})
    'training.lr 0.001 -> 0.0005, training.max_updates unset -> 90'
    """
    shown = {name: ["unset" if value is None else str(value) for value in values] for name, values in settings.items()}
    return ", ".join(f"{name} {' -> '.join(values)}" for name, values in shown.items())


def settings_by_name(settings: Settings) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each setting."""
    return _leaves(settings.model_dump(mode="json"))


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) for all values in nested settings, in order."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if children is None:
        yield name, value
        return
    for key, child in children:
        yield from _leaves(child, f"{name}.{key}" if name else str(key))


Status = Literal["ok", "DAMAGED", "MISSING", "changed", "unchecked"]


@dataclass(frozen=True, slots=True)
class FileStatus:
    """A file of a run folder and the result of its check."""

    name: str
    status: Status = "ok"
    reason: str = ""

    @property
    def is_error(self) -> bool:
        """Whether the status means that the run is not intact."""
        return self.status in ("DAMAGED", "MISSING")

    def line(self) -> str:
        return f"{self.status:9} {self.name}" + (f": {self.reason}" if self.reason else "")


def verify_files(path: Path) -> list[FileStatus]:
    """Check all files of the run folder at `path`; reads every byte.

    Raises `RunFolderError` if the manifest, which has the checksums, cannot be read.
    """
    path = Path(path)
    manifest = Manifest.read(path)
    expected: dict[Path, Fingerprint | None] = {}
    expected |= {path / name: was for name, was in {**manifest.files, **manifest.records}.items()}
    for seal in [*(folder / NAME for folder in sorted(path.glob("checkpoints/u*"))), *path.glob(f"tokens/{NAME}")]:
        expected[seal] = None
        with suppress(RunFolderError):
            expected |= {seal.parent / name: was for name, was in sealed_files(seal.parent).items()}
    for state in sorted(path.glob("checkpoints/u*/state.json")) if (path / "averaging").exists() else ():
        with suppress(RunFolderError), expecting(state):
            average = read_json(state)["average"]["files"]
            expected |= {path / "averaging" / name: was for name, was in average.items()}
    statuses = [FileStatus(NAME), *(_checked(path, file, was) for file, was in expected.items())]
    others = sorted(file for file in path.rglob("*") if file.is_file() and file not in {path / NAME, *expected})
    names = (file.relative_to(path).as_posix() for file in others)
    return statuses + [FileStatus(name, "unchecked", "it has no checksum") for name in names]


def _checked(path: Path, file: Path, expected: Fingerprint | None) -> FileStatus:
    """Compare a file with its fingerprint; without a fingerprint, check the form of the file, a folder's manifest."""
    name = file.relative_to(path).as_posix()
    try:
        if expected is None:
            sealed_files(file.parent)
        else:
            check_file(file, expected)
    except RunFolderError as error:
        if not file.exists():
            return FileStatus(name, "MISSING")
        if name == "README.md":
            return FileStatus(name, "changed", "not as transduce wrote it; a model card may be edited")
        return FileStatus(name, "DAMAGED", str(error).removeprefix(f"{file} ").removeprefix("is damaged: "))
    return FileStatus(name)


def summarize(files: Sequence[FileStatus]) -> str:
    """Format the number of files by status, in one line.

    >>> summarize([FileStatus("a"), FileStatus("b", "MISSING"), FileStatus("c", "unchecked")])
    '1 of 3 files match their checksums; 1 missing, 1 unchecked'
    """
    counts = Counter(file.status for file in files)
    n_ok = counts.pop("ok", 0)
    others = ", ".join(f"{counts[status]} {status.lower()}" for status in get_args(Status) if counts[status])
    head = f"all {n_ok}" if not others else f"{n_ok} of {len(files)}"
    return f"{head} files match their checksums" + (f"; {others}" if others else "")
