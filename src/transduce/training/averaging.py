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
from typing import Any, final

import torch
from torch import Tensor

from transduce.errors import RunFolderError
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
def borrowed(live: Weights, weights: Weights) -> Iterator[None]:
    """Give the `live` tensors the values of `weights` inside the context, and restore them exactly on exit.

    Values are copied, not swapped, because compiled graphs and optimizers keep the addresses.
    """
    if weights is live:
        yield
        return
    own = {name: tensor.detach().clone() for name, tensor in live.items()}
    try:
        copy_values(live, weights)
        yield
    finally:
        copy_values(live, own)


@torch.no_grad()
def copy_values(into: Weights, values: Weights) -> None:
    """Copy `values` into the tensors of the same names; `ValueError` if a shape or type differs."""
    for name, tensor in into.items():
        value = values[name]
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise ValueError(f"{name} is {value.dtype} {list(value.shape)}, not {tensor.dtype} {list(tensor.shape)}")
        tensor.copy_(value)


class Average(ABC):
    """The weights that a run keeps. `live` are the model's own parameters by name; `folder` is for snapshots."""

    def __init__(self, live: Weights, *, folder: Path, n: int, decay: float) -> None:
        self.live, self.folder, self.n, self.decay = live, folder, n, decay

    def after_update(self) -> None:  # noqa: B027 - optional
        """Use the live weights. Called after every update, so it must be cheap."""

    @abstractmethod
    def candidate(self, update: int) -> Weights:
        """The weights to validate after `update`."""

    def keep(self, update: int, score: float, *, better: bool) -> Weights | None:
        """The weights to write as the run's model after a validation; None to keep the model written before."""
        return self.candidate(update) if better else None

    def remove_unused(self, states: Iterable[Mapping[str, Any]]) -> None:  # noqa: B027 - optional
        """Remove files that none of `states`, the states of all checkpoints on disk, refers to."""

    def tensors(self) -> Weights:
        """Tensors of the state, for a checkpoint."""
        return {}

    def state(self) -> dict[str, Any]:
        """The rest of the state, as JSON values."""
        return {}

    def load(self, tensors: Weights, state: Mapping[str, Any]) -> list[str]:
        """Restore a saved state; return notes for the user on what could not be restored."""
        return []


@final
class _BestValidation(Average):
    """`none`: the live weights."""

    def candidate(self, update: int) -> Weights:
        return self.live


@final
class _MovingAverage(Average):
    """`ema`: after every update, average <- decay * average + (1 - decay) * weights."""

    def __init__(self, live: Weights, *, folder: Path, n: int, decay: float) -> None:
        super().__init__(live, folder=folder, n=n, decay=decay)
        self.average = {name: tensor.detach().clone() for name, tensor in live.items()}
        self.count = 0

    @torch.no_grad()
    def after_update(self) -> None:
        share = 1.0 - decay_at(self.count, self.decay)
        torch._foreach_lerp_(list(self.average.values()), list(self.live.values()), share)
        self.count += 1

    def candidate(self, update: int) -> Weights:
        return self.average

    def tensors(self) -> Weights:
        return self.average

    def state(self) -> dict[str, Any]:
        return {"count": self.count}

    def load(self, tensors: Weights, state: Mapping[str, Any]) -> list[str]:
        copy_values(self.average, tensors)
        self.count = int(state["count"])
        return []


class _Snapshots(Average):
    """Weights of several validations in files: the common part of `last` and `best`."""

    def __init__(self, live: Weights, *, folder: Path, n: int, decay: float) -> None:
        super().__init__(live, folder=folder, n=n, decay=decay)
        self.kept: list[tuple[int, float]] = []  # (update, score), in the order of the mean

    def path(self, update: int) -> Path:
        return self.folder / f"u{update:08d}.safetensors"

    def write(self, update: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        save_tensors(self.path(update), self.live)

    def others(self, update: int) -> list[tuple[int, float]]:
        """The kept snapshots but that of `update`, whose validation a resumed run repeats."""
        return [entry for entry in self.kept if entry[0] != update]

    def mean(self) -> Weights:
        return mean_of(self.path(update) for update, _ in self.kept)

    def remove_unused(self, states: Iterable[Mapping[str, Any]]) -> None:
        kept = [*self.kept, *(entry for state in states for entry in state.get("kept", ()))]
        useful = {self.path(int(update)) for update, _ in kept}
        for path in self.folder.glob("u*.safetensors"):
            if path not in useful:
                path.unlink(missing_ok=True)

    def state(self) -> dict[str, Any]:
        return {"kept": [list(entry) for entry in self.kept]}

    def load(self, tensors: Weights, state: Mapping[str, Any]) -> list[str]:
        """Restore the list of snapshots. Those that are missing or damaged are left out, with a note for each."""
        self.kept, notes = [], []
        shapes = {name: tensor.shape for name, tensor in self.live.items()}
        for update, score in state["kept"]:
            path = self.path(int(update))
            try:
                if {name: tensor.shape for name, tensor in load_tensors(path).items()} != shapes:
                    raise RunFolderError(f"{path} is damaged: these are not the weights of this run")
                self.kept.append((int(update), float(score)))
            except RunFolderError as error:
                notes.append(f"left out of the averaged weights: {error}")
        return notes


@final
class _MeanOfLast(_Snapshots):
    """`last`: the mean of the weights at the last `n` validations, whatever its score."""

    def candidate(self, update: int) -> Weights:
        self.write(update)
        self.kept = [*self.others(update), (update, 0.0)][-self.n :]
        return self.mean()

    def keep(self, update: int, score: float, *, better: bool) -> Weights | None:
        return self.mean()


@final
class _MeanOfBest(_Snapshots):
    """`best`: the mean of the weights at the `n` best validations. Of equal scores, the later is better."""

    def candidate(self, update: int) -> Weights:
        return self.live

    def keep(self, update: int, score: float, *, better: bool) -> Weights | None:
        entries = [*self.others(update), (update, score)]
        best = sorted(entries, key=lambda entry: (-entry[1], -entry[0]))[: self.n]
        if all(entry[0] != update for entry in best):
            return None
        self.write(update)
        self.kept = best
        return self.mean()


AVERAGES: dict[str, type[Average]] = {
    "none": _BestValidation,
    "last": _MeanOfLast,
    "best": _MeanOfBest,
    "ema": _MovingAverage,
}
