"""Every file of a run folder against its checksum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transduce.errors import RunFolderError
from transduce.runs.checkpoints import FILES, check_state
from transduce.runs.folder import RunFolder
from transduce.runs.manifest import check_file, sealed_files
from transduce.runs.tensors import check_tensors

FREE = ("report.html", "README.md")
"""Made from the others, and nothing reads them; a card may be edited."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file of a run folder: what is wrong with it, or nothing; `unchecked`: why there is nothing to check it by."""

    name: str
    wrong: str = ""
    unchecked: str = ""

    def line(self) -> str:
        """For people."""
        state = "DAMAGED" if self.wrong else "-" if self.unchecked else "ok"
        return f"{state:8} {self.name}" + (f": {self.wrong or self.unchecked}" if self.wrong or self.unchecked else "")


def verify_files(path: Path) -> list[Found]:
    """All files of the run folder at `path`, checked; reads every byte.

    Raises `RunFolderError` where there is no manifest to read: then nothing can be said.
    """
    path = Path(path)
    manifest = RunFolder.manifest_of(path)
    found = [Found("manifest.json")]
    for name, was in {**manifest["files"], **manifest.get("records", {})}.items():
        found.append(_tried(path, name, partial(check_file, path / name, was)))
    if (path / "model.safetensors").exists():
        found.append(_tried(path, "model.safetensors", partial(check_tensors, path / "model.safetensors")))
    found += _states(path)
    found += _tokens(path)
    for file in sorted((path / "averaging").glob("*.safetensors")):
        found.append(_tried(path, f"averaging/{file.name}", partial(check_tensors, file)))
    seen = {one.name for one in found}
    return found + [
        Found(name, unchecked=_why_not(name))
        for file in sorted(path.rglob("*"))
        if file.is_file() and (name := file.relative_to(path).as_posix()) not in seen
    ]


def _tried(path: Path, name: str, check: Callable[[], object]) -> Found:
    try:
        check()
    except RunFolderError as error:
        return Found(name, wrong=str(error).removeprefix(f"{path / name} ").removeprefix("is damaged: "))
    return Found(name)


def _states(path: Path) -> Iterator[Found]:
    """The files of the training states; what is wrong stands beside the one that it is told of."""
    for folder in sorted((path / "checkpoints").glob("u*")):
        wrong = ""
        try:
            check_state(folder)
        except RunFolderError as error:
            wrong = str(error)
        for file in (*FILES, "manifest.json"):
            name = f"checkpoints/{folder.name}/{file}"
            of_this = str(folder / file) in wrong or (file == "manifest.json" and wrong and str(folder) in wrong)
            one_of_files = any(str(folder / other) in wrong for other in FILES)
            yield Found(name, wrong=wrong if of_this and not (file == "manifest.json" and one_of_files) else "")


def _tokens(path: Path) -> list[Found]:
    tokens = path / "tokens"
    if not (tokens / "manifest.json").exists():
        return []
    try:
        sealed = sealed_files(tokens)
    except RunFolderError as error:
        return [Found("tokens/manifest.json", wrong=str(error))]
    return [Found("tokens/manifest.json")] + [
        _tried(path, f"tokens/{name}", partial(check_file, tokens / name, was)) for name, was in sealed.items()
    ]


def _why_not(name: str) -> str:
    if name in FREE:
        return "nothing reads it, and it may be edited"
    if name in ("recipe.toml", "bad_loss.json"):
        return "for people: nothing of the run depends on it"
    if name == "metrics.jsonl":
        return "still written to; the next start holds it against the last checkpoint"
    if name == ".lock" or name.endswith(".aside"):
        return "of a training that runs, or was killed: the next start clears it"
    return "no checksum: of an early version, or not transduce's"
