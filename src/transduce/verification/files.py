"""Check every file of a run folder: what is damaged, missing, changed, unknown, or cannot be checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, get_args

from transduce.errors import RunFolderError
from transduce.runs.atomic import MOST_SETTINGS, read_json
from transduce.runs.checkpoints import FILES
from transduce.runs.manifest import Manifest, check_file, sealed_files
from transduce.runs.tensor_file import check_tensors

Status = Literal["ok", "DAMAGED", "MISSING", "changed", "unknown", "unchecked"]

EDITABLE = ("README.md",)
_UNCHECKED = {
    "recipe.toml": "a copy for people; training does not read it",
    "skipped.jsonl": "for people; training only adds to it",
    "metrics.jsonl": "training still writes to it; a resume compares it with the last checkpoint",
    ".lock": "a training is running, or was killed",
    "*.aside": "a temporary file of a process that is running or was killed; the next start removes it",
    "tokens/*": "the text is still being prepared",
    "preparation/*": "the text is still being prepared",
    **dict.fromkeys(("tensorboard/*", "wandb/*", "mlruns/*"), "written by an experiment tracker"),
} | dict.fromkeys(
    (
        *("data.json", "scores.json", "text_scores.json", "label_scores.json", "masked_scores.json"),
        *("samples.json", "attention.json", "time_limit.json", "report.html", "README.md"),
    ),
    "no checksum: training still runs",
)
"""Files that transduce writes and that have no checksum, or none yet: pattern and reason."""


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
    for file in sorted((path / "averaging").glob("*.safetensors")):
        found.append(_checked(path, f"averaging/{file.name}", check_tensors, file))
    seen = {one.name for one in found}
    names = (file.relative_to(path).as_posix() for file in sorted(path.rglob("*")) if file.is_file())
    return found + [_unlisted(name, is_sealed="tokens/manifest.json" in seen) for name in names if name not in seen]


def summary(found: Sequence[FileStatus]) -> str:
    """The number of files by status, in one line.

    >>> summary([FileStatus("a"), FileStatus("b", "MISSING"), FileStatus("c", "unknown")])
    '1 of 3 files match their checksums; 1 missing, 1 unknown'
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
    for file in (path / "checkpoints").glob("u*/state.json"):
        try:
            state = read_json(file, most=MOST_SETTINGS)
            if state["training"]["validated"] >= 0:
                return True
        except (RunFolderError, LookupError, TypeError):
            continue  # reported as damaged
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


def _unlisted(name: str, *, is_sealed: bool) -> FileStatus:
    """A file without a checksum. `is_sealed`: those of all encoded text are known."""
    if is_sealed and name.startswith("tokens/") and not name.endswith(".aside"):
        return FileStatus(name, "unknown", "not written by transduce")
    for pattern, reason in _UNCHECKED.items():
        if fnmatch(name, pattern):
            return FileStatus(name, "unchecked", reason)
    return FileStatus(name, "unknown", "not written by transduce")
