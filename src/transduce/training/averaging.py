"""Averages of the weights over training: a moving average in memory, or the mean of snapshots in files.

`training.average` decides which weights become the run's model. Each value is one class of the AVERAGES table:

- `none`: the weights at the best validation;
- `ema`: the exponential moving average at the best validation;
- `last`: the mean of the weights at the last `average_n` validations, whatever their scores (the paper's section 6.1
  averages the last 5 to 20 checkpoints);
- `best`: the mean of the weights at the `average_n` best validations.

Validation scores the weights that would be kept: the moving average for `ema`, the mean for `last`. For `best` it
scores the live weights, since each snapshot needs its own score. Snapshots are files, so at most two copies are in
memory.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.errors import RunFolderError
from transduce.runs.atomic import expecting
from transduce.runs.tensors import load_tensors, save_tensors

Weights = Mapping[str, Tensor]


def decay_at(n: int, decay: float) -> float:
    """Decay of the moving average at update `n` (from 0): `decay`, warmed up as (1 + n) / (10 + n).

    Without the warm-up, the random initial weights would remain in the average for long.
    """
    return min(decay, (1 + n) / (10 + n))


def mean_of(paths: Iterable[Path]) -> dict[str, Tensor]:
    """The mean of the weights in several files, summed in float64 and rounded once. Loads one file at a time."""
    total: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    n_files = 0
    for path in paths:
        for name, tensor in load_tensors(path).items():
            dtypes[name] = tensor.dtype
            total[name] = total[name].add_(tensor) if name in total else tensor.double()
        n_files += 1
    if not n_files:
        raise ValueError("no files to average")
    return {name: (tensor / n_files).to(dtypes[name]) for name, tensor in total.items()}


@contextlib.contextmanager
def borrowed(live: Weights, weights: Weights | None) -> Iterator[None]:
    """Give the `live` tensors the values of `weights` inside the context, and restore them exactly on exit.

    None changes nothing. Values are copied, not swapped, because compiled graphs and optimizers keep the addresses.
    """
    if weights is None:
        yield
        return
    own = {name: tensor.detach().clone() for name, tensor in live.items()}
    try:
        _copy(live, weights)
        yield
    finally:
        _copy(live, own)


@torch.no_grad()
def _copy(into: Weights, values: Weights) -> None:
    """Copy `values` into the tensors of the same names; `ValueError` if a shape differs."""
    for name, tensor in into.items():
        if values[name].shape != tensor.shape:
            raise ValueError(f"{name} is {list(values[name].shape)}, not {list(tensor.shape)}")
        tensor.copy_(values[name])


class Average(ABC):
    """The weights that a run keeps. `live` are the model's own parameters by name; `folder` is for snapshots."""

    def __init__(self, live: Weights, *, folder: Path, n: int, decay: float) -> None:
        self.live, self.folder, self.n, self.decay = live, folder, n, decay

    def after_update(self) -> None:
        """Use the live weights. Called after every update, so it must be cheap."""
        return None

    @abstractmethod
    def candidate(self, update: int) -> Weights | None:
        """The weights to validate after `update`; None for the live ones."""

    @abstractmethod
    def keep(self, update: int, score: float, *, better: bool) -> Weights | None:
        """The weights to write as the run's model after a validation; None to keep the model written before."""

    def saved(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Remove files that none of `states`, the states of all checkpoints on disk, refers to."""
        return None

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the state, for a checkpoint."""
        return {}

    def state(self) -> dict[str, Any]:
        """The rest of the state, as JSON values."""
        return {}

    def load(self, tensors: Weights, state: Mapping[str, Any]) -> list[str]:
        """Restore a saved state; return notes for the user on what could not be restored."""
        return []


class Single(Average):
    """`none`: the weights at the best validation."""

    def candidate(self, update: int) -> Weights | None:
        """The live weights."""
        return None

    def keep(self, update: int, score: float, *, better: bool) -> Weights | None:
        """The live weights, if they are the best so far."""
        return self.live if better else None


class MovingAverage(Average):
    """`ema`: after every update, average <- decay * average + (1 - decay) * weights."""

    def __init__(self, live: Weights, *, folder: Path, n: int, decay: float) -> None:
        super().__init__(live, folder=folder, n=n, decay=decay)
        self.average = {name: tensor.detach().clone() for name, tensor in live.items()}
        self.count = 0

    @torch.no_grad()
    def after_update(self) -> None:
        """Move the average towards the live weights, in place."""
        share = 1.0 - decay_at(self.count, self.decay)
        torch._foreach_lerp_(list(self.average.values()), list(self.live.values()), share)
        self.count += 1

    def candidate(self, update: int) -> Weights | None:
        """The average."""
        return self.average

    def keep(self, update: int, score: float, *, better: bool) -> Weights | None:
        """The average, if it is the best so far."""
        return self.average if better else None

    def tensors(self) -> dict[str, Tensor]:
        """The average."""
        return dict(self.average)

    def state(self) -> dict[str, Any]:
        """The number of averaged updates."""
        return {"count": self.count}

    def load(self, tensors: Weights, state: Mapping[str, Any]) -> list[str]:
        """Restore a saved average."""
        _copy(self.average, tensors)
        self.count = int(state["count"])
        return []


class Snapshots(Average):
    """Weights of several validations in files: the common part of `last` and `best`."""

    def __init__(self, live: Weights, *, folder: Path, n: int, decay: float) -> None:
        super().__init__(live, folder=folder, n=n, decay=decay)
        self.kept: list[tuple[int, float]] = []  # (update, score), in the order of the mean

    def path(self, update: int) -> Path:
        """The file of one snapshot."""
        return self.folder / f"u{update:08d}.safetensors"

    def write(self, update: int) -> None:
        """Write a snapshot of the live weights."""
        self.folder.mkdir(parents=True, exist_ok=True)
        save_tensors(self.path(update), {name: tensor.detach() for name, tensor in self.live.items()})

    def mean(self) -> dict[str, Tensor]:
        """The mean of the kept snapshots."""
        return mean_of(self.path(update) for update, _ in self.kept)

    def saved(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Remove files that no checkpoint refers to."""
        referred = {int(update) for state in states for update, _ in state.get("kept", ())}
        useful = {self.path(update) for update in referred | {update for update, _ in self.kept}}
        for path in self.folder.glob("u*.safetensors"):
            if path not in useful:
                path.unlink(missing_ok=True)

    def state(self) -> dict[str, Any]:
        """Updates and scores of the snapshots."""
        return {"kept": [list(entry) for entry in self.kept]}

    def load(self, tensors: Weights, state: Mapping[str, Any]) -> list[str]:
        """Restore the list of snapshots. Those that are missing or damaged are left out, with a note for each."""
        self.kept, notes = [], []
        for update, score in state["kept"]:
            try:
                self._check(int(update))
                self.kept.append((int(update), float(score)))
            except RunFolderError as error:
                notes.append(f"left out of the averaged weights: {error}")
        return notes

    def _check(self, update: int) -> None:
        """Raise `RunFolderError` unless the snapshot is complete and of this model."""
        path = self.path(update)
        with expecting(path):
            found = {name: tuple(tensor.shape) for name, tensor in load_tensors(path).items()}
            if found != {name: tuple(tensor.shape) for name, tensor in self.live.items()}:
                raise ValueError("these are not the weights of this run")


class MeanOfLast(Snapshots):
    """`last`: the mean of the weights at the last `n` validations."""

    def candidate(self, update: int) -> Weights | None:
        """Write the live weights as the newest snapshot; return the mean."""
        self.write(update)
        self.kept = [*(entry for entry in self.kept if entry[0] != update), (update, 0.0)][-self.n :]
        return self.mean()

    def keep(self, update: int, score: float, *, better: bool) -> Weights | None:
        """The mean, whatever its score."""
        return self.mean()


class MeanOfBest(Snapshots):
    """`best`: the mean of the weights at the `n` best validations."""

    def candidate(self, update: int) -> Weights | None:
        """The live weights: each snapshot needs its own score."""
        return None

    def keep(self, update: int, score: float, *, better: bool) -> Weights | None:
        """The mean of the best so far, if the live weights are among them. Of equal scores, the later is better."""
        others = [entry for entry in self.kept if entry[0] != update]
        best = sorted([*others, (update, score)], key=lambda entry: (-entry[1], -entry[0]))[: self.n]
        if all(entry[0] != update for entry in best):
            return None
        self.write(update)
        self.kept = best
        return self.mean()


AVERAGES: dict[str, type[Average]] = {"none": Single, "last": MeanOfLast, "best": MeanOfBest, "ema": MovingAverage}
