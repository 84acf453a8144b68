"""Check every file of a run folder: what is damaged, missing, changed, or has no checksum."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from transduce.errors import RunFolderError
from transduce.metrics_log import MetricsFile
from transduce.runs.checkpoints import FILES
from transduce.runs.manifest import Manifest, check_file, sealed_files
from transduce.runs.tensor_file import check_tensors

Status = Literal["ok", "DAMAGED", "MISSING", "changed", "unchecked"]

EDITABLE = ("README.md",)


@dataclass(frozen=True, slots=True)
class FileStatus:
    """A file of a run folder and the result of its check."""

    name: str
    status: Status = "ok"
    reason: str = ""

    @property
    def is_error(self) -> bool:
        """Whether the run cannot be relied on."""
        return self.status in ("DAMAGED", "MISSING")

    def line(self) -> str:
        """One line for people."""
        return f"{self.status:9} {self.name}" + (f": {self.reason}" if self.reason else "")


def verify_files(path: Path) -> list[FileStatus]:
    """Check all files of the run folder at `path`; reads every byte.

    Raises `RunFolderError` if the manifest cannot be read: then there is nothing to check by.
    """
    path = Path(path)
    manifest = Manifest.read(path)
    found = [FileStatus("manifest.json"), *_listed(path, manifest), *_model(path, manifest)]
    for folder in sorted((path / "checkpoints").glob("u*")):
        found += _sealed(path, folder, FILES)
    if (path / "tokens" / "manifest.json").exists():
        found += _sealed(path, path / "tokens")
    for file in (*path.glob("shortlist.safetensors"), *sorted(path.glob("averaging/*.safetensors"))):
        found.append(_checked(path, file.relative_to(path).as_posix(), check_tensors, file))
    seen = {one.name for one in found}
    names = (file.relative_to(path).as_posix() for file in sorted(path.rglob("*")) if file.is_file())
    return found + [FileStatus(name, "unchecked", "it has no checksum") for name in names if name not in seen]


def summary(found: Sequence[FileStatus]) -> str:
    """The number of files by status, in one line.

    >>> summary([FileStatus("a"), FileStatus("b", "MISSING"), FileStatus("c", "unchecked")])
    '1 of 3 files match their checksums; 1 missing, 1 unchecked'
    """
    counts = Counter(one.status for one in found)
    n_ok = counts.pop("ok", 0)
    others = ", ".join(f"{counts[status]} {status.lower()}" for status in get_args(Status) if counts[status])
    head = f"all {n_ok}" if not others else f"{n_ok} of {len(found)}"
    return f"{head} files match their checksums" + (f"; {others}" if others else "")


def _listed(path: Path, manifest: Manifest) -> Iterator[FileStatus]:
    for name, expected in {**manifest.files, **manifest.records}.items():
        found = _checked(path, name, check_file, path / name, expected)
        if name in EDITABLE and found.status == "DAMAGED":
            found = FileStatus(name, "changed", "not as transduce wrote it; a model card may be edited")
        yield found


def _model(path: Path, manifest: Manifest) -> Iterator[FileStatus]:
    name = "model.safetensors"
    found = _checked(path, name, check_tensors, path / name)
    if found.status != "MISSING" or _has_had_a_model(path, manifest):
        yield found


def _has_had_a_model(path: Path, manifest: Manifest) -> bool:
    """Whether weights were ever saved: at the first validation, or by an import, which leaves no text behind."""
    if not manifest.tokenizers:
        return False
    if not (path / "tokens").exists():
        return True
    with contextlib.suppress(RunFolderError):
        return any(event["event"] == "validation" for event in MetricsFile(path / "metrics.jsonl").read())
    return False


def _sealed(path: Path, folder: Path, required: Sequence[str] = ()) -> Iterator[FileStatus]:
    """The files of a folder with its own manifest."""
    prefix = folder.relative_to(path).as_posix()
    found = _checked(path, f"{prefix}/manifest.json", sealed_files, folder, required)
    yield found
    if found.is_error:
        for file in sorted(one for one in folder.rglob("*") if one.is_file() and one.name != "manifest.json"):
            yield FileStatus(file.relative_to(path).as_posix(), "unchecked", f"{prefix}/manifest.json is damaged")
        return
    for name, expected in sealed_files(folder).items():
        yield _checked(path, f"{prefix}/{name}", check_file, folder / name, expected)


def _checked(path: Path, name: str, check: Callable[..., object], *arguments: Any) -> FileStatus:
    try:
        check(*arguments)
    except RunFolderError as error:
        if not (path / name).exists():
            return FileStatus(name, "MISSING")
        return FileStatus(name, "DAMAGED", str(error).removeprefix(f"{path / name} ").removeprefix("is damaged: "))
    return FileStatus(name)
