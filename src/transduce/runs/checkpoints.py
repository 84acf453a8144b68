"""Checkpoints to resume training from: folders uNNNNNNNN, each with a manifest, written atomically.

u00001234/training.safetensors, state.json, manifest.json, and a file in shards/ for each rank that shards the weights
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from transduce.errors import RunFolderError
from transduce.runs.atomic import expecting, read_json, write_aside
from transduce.runs.manifest import check_sealed, seal_folder
from transduce.runs.tensors import FOLDER as SHARDS
from transduce.runs.tensors import load_tensors, write_tensors

FILES = ("training.safetensors", "state.json")
_NAME = re.compile(r"u(\d{8,})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose checksums are correct. `notes`: warnings of damaged newer checkpoints and other versions."""

    path: Path
    update: int
    state: dict[str, Any]
    notes: tuple[str, ...] = ()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Load the tensors of the checkpoint, on the CPU."""
        return load_tensors(self.path / "training.safetensors")


class Checkpoints:
    """The checkpoints in a folder, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._good: set[int] = set()  # written or verified by this process

    def updates(self) -> list[int]:
        """Return the update numbers of all checkpoints, including damaged checkpoints, newest first."""
        there = self.path.iterdir() if self.path.is_dir() else ()
        return sorted((int(match[1]) for p in there if (match := _NAME.fullmatch(p.name))), reverse=True)

    def at(self, update: int) -> Path:
        return self.path / f"u{update:08d}"

    def shards(self, update: int) -> Path:
        """Return the temporary folder into which ranks write shards before the checkpoint of `update` is saved."""
        # `remove_leftovers` removes it if the process is killed before the move
        return self.path / f".u{update:08d}.shards.aside"

    def save(self, update: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> Path:
        """Store a checkpoint completely or, if this fails or is killed, not at all.

        It includes the shards that all ranks have written into `shards(update)`.
        """
        path = self.at(update)
        with write_aside(path) as aside:
            aside.mkdir(parents=True)
            write_tensors(aside / "training.safetensors", tensors)
            values = {"update": update, "environment": environment(), **state}
            (aside / "state.json").write_text(json.dumps(values), encoding="utf-8")
            if self.shards(update).exists():
                os.rename(self.shards(update), aside / SHARDS)
            seal_folder(aside)
        self._good.add(update)
        return path

    def load(self, update: int) -> Checkpoint:
        """Load the checkpoint of an update. Raises `RunFolderError`, which names a damaged or missing file."""
        path = self.at(update)
        check_sealed(path, required=FILES)
        state = read_json(path / "state.json")
        self._good.add(update)
        return Checkpoint(path, update, state)

    def latest(self) -> Checkpoint | None:
        """Load the newest undamaged checkpoint; return None if there are no checkpoints.

        Raises `RunFolderError` if all are damaged, as starting over is the user's decision.
        """
        damaged: list[str] = []
        for update in self.updates():
            try:
                checkpoint = self.load(update)
            except RunFolderError as error:
                damaged.append(str(error))
                continue
            notes = [f"{problem}; resuming from the checkpoint before it, update {update}" for problem in damaged]
            with expecting(checkpoint.path / "state.json"):
                notes += _environment_changes(checkpoint.state["environment"])
            return replace(checkpoint, notes=tuple(notes))
        if damaged:
            raise RunFolderError(
                f"every checkpoint is damaged: {'; '.join(damaged)}; to start over, delete {self.path.parent}"
            )
        return None

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` undamaged checkpoints."""
        assert keep >= 1, "the last checkpoint is never removed"
        for update in self.updates():
            if keep > 0:
                keep -= self._is_good(update)
            else:
                shutil.rmtree(self.at(update), ignore_errors=True)

    def states(self) -> Iterator[dict[str, Any]]:
        """Yield the content of state.json of each checkpoint in which it can be read."""
        for update in self.updates():
            with contextlib.suppress(RunFolderError):
                yield read_json(self.at(update) / "state.json")

    def _is_good(self, update: int) -> bool:
        if update not in self._good:
            with contextlib.suppress(RunFolderError):
                self.load(update)
        return update in self._good


def environment() -> dict[str, Any]:
    """Return factors besides the machine that affect rounding on a CPU: versions and the number of threads."""
    return {"PyTorch": str(torch.__version__), "NumPy": np.__version__, "threads": torch.get_num_threads()}


def _environment_changes(saved: Mapping[str, Any]) -> list[str]:
    """Return a list with a warning if a checkpoint was saved in another environment, otherwise an empty list."""
    now = environment()
    changed = "; ".join(f"{name} {saved[name]}, now {now[name]}" for name in now if saved[name] != now[name])
    note = f"the checkpoint was saved with {changed}: results are equal up to rounding, not bit for bit"
    return [note] if changed else []
