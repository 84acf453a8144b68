"""Training states to go on from: folders uNNNNNNNN, each written aside, with a manifest of its own, and renamed.

u00001234/training.safetensors, state.json, manifest.json
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from transduce.errors import RunFolderError
from transduce.runs.atomic import read_json, write_aside
from transduce.runs.format_version import FORMAT, check_format
from transduce.runs.manifest import check_file, fingerprint
from transduce.runs.tensors import load_tensors, write_tensors

FILES = ("training.safetensors", "state.json")
_NAME = re.compile(r"u(\d{8,})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One verified training state. `notes` tell of damaged newer ones that were passed over."""

    path: Path
    update: int
    state: dict[str, Any]
    notes: tuple[str, ...] = ()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the state, on the CPU."""
        return load_tensors(self.path / "training.safetensors", sealed=False)  # the manifest vouches for it


@dataclass(eq=False)
class Checkpoints:
    """The training states in a folder, which may not be there yet."""

    path: Path
    _good: set[str] = field(default_factory=set, repr=False)  # what this process wrote or verified

    def updates(self) -> list[int]:
        """The updates that there are states of, newest first; whole or not."""
        there = self.path.iterdir() if self.path.is_dir() else ()
        return sorted((int(found[1]) for p in there if (found := _NAME.fullmatch(p.name))), reverse=True)

    def at(self, update: int) -> Path:
        """The folder of one."""
        return self.path / f"u{update:08d}"

    def save(self, update: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> Path:
        """Store a state: all of it or, when this fails or is killed, nothing."""
        path = self.at(update)
        with write_aside(path) as aside:
            aside.mkdir(parents=True)
            write_tensors(aside / "training.safetensors", tensors, seal=False)
            (aside / "state.json").write_text(json.dumps({"update": update, **state}), encoding="utf-8")
            files = {name: fingerprint(aside / name) for name in FILES}
            (aside / "manifest.json").write_text(
                json.dumps({"format": FORMAT, "files": files}, indent=2), encoding="utf-8"
            )
        self._good.add(path.name)
        return path

    def load(self, update: int) -> Checkpoint:
        """The state of this update; a `RunFolderError` names what is damaged or missing."""
        path = self.at(update)
        check_state(path)
        state = read_json(path / "state.json")
        self._good.add(path.name)
        return Checkpoint(path, update, state)

    def latest(self) -> Checkpoint | None:
        """The newest state that is whole; `None` where none was ever saved.

        Damaged newer ones are passed over and named in `.notes`. Raises `RunFolderError` where all are damaged: to
        start over is the user's choice.
        """
        notes: list[str] = []
        for update in self.updates():
            try:
                found = self.load(update)
            except RunFolderError as error:
                notes.append(str(error))
                continue
            told = tuple(f"{note}; going on from the checkpoint before it, update {update}" for note in notes)
            return Checkpoint(found.path, update, found.state, told)
        if notes:
            raise RunFolderError(
                f"every checkpoint is damaged: {'; '.join(notes)}; to start over, delete {self.path.parent}"
            )
        return None

    def prune(self, keep: int, *, spare: Collection[int] = ()) -> list[Path]:
        """Remove all but the newest `keep` whole states and those of the updates `spare`; what was removed.

        The last good one always stays.
        """
        assert keep >= 1, "the last state is never pruned"
        n_good = 0
        removed = []
        for update in self.updates():
            path = self.at(update)
            if n_good >= keep:
                if update not in spare:
                    shutil.rmtree(path, ignore_errors=True)
                    removed.append(path)
            elif self._is_good(path):
                n_good += 1
        return removed

    def forget_after(self, update: int) -> None:
        """Remove what is newer than a state, which must be whole: the run went back to it."""
        check_state(self.at(update))
        for newer in self.updates():
            if newer > update:
                shutil.rmtree(self.at(newer), ignore_errors=True)

    def states(self) -> Iterator[dict[str, Any]]:
        """What state.json holds, of all whose file can be read."""
        for update in self.updates():
            with contextlib.suppress(RunFolderError):
                yield read_json(self.at(update) / "state.json")

    def _is_good(self, path: Path) -> bool:
        if path.name not in self._good:
            with contextlib.suppress(RunFolderError):
                check_state(path)
                self._good.add(path.name)
        return path.name in self._good


def check_state(path: Path) -> None:
    """Check a training state against its manifest; `RunFolderError` names the damaged file."""
    manifest = read_json(path / "manifest.json")
    try:
        files = dict(manifest["files"])
        expected = {name: dict(files[name]) for name in FILES}
        found = manifest["format"]
    except (KeyError, TypeError, ValueError):
        raise RunFolderError(f"{path / 'manifest.json'} is damaged: it does not describe a checkpoint") from None
    check_format(found, path)
    for name, was in expected.items():
        check_file(path / name, was)
