"""Averages of the weights over training: a moving average in memory, or the mean of snapshots in files.

`training.average` decides which weights become the run's model. Each value is one class of the AVERAGES table:

- `none`: the weights at the best validation;
- `ema`: the exponential moving average at the best validation;
- `last`: the mean of the weights at the last `average_n` validations, whatever their scores (the paper's section 6.1
  averages the last 5 to 20 checkpoints). They are kept in files, so at most two copies are in memory.

Validation scores the weights that would be kept.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from transduce.errors import RunFolderError
from transduce.runs.shards import gather, shard_of, sharded_like
from transduce.runs.tensors import load_tensors, save_tensors
from transduce.training.ranks import SINGLE_RANK, Ranks

Weights = Mapping[str, Tensor]


def decay_at(n: int, decay: float) -> float:
    """Decay of the moving average at update `n` (from 0): `decay`, warmed up as (1 + n) / (10 + n).

    Without the warm-up, the random initial weights would remain in the average for long.
    """
    return min(decay, (1 + n) / (10 + n))


def mean_of(paths: Sequence[Path], like: Weights) -> dict[str, Tensor]:
    """The mean of the weights in several files, summed in float64 and rounded once. Loads one file at a time.

    Sharded, if those in `like` are.
    """
    total: dict[str, Tensor] = {}
    for path in paths:
        for name, found in load_tensors(path).items():
            tensor = sharded_like(found, like[name])
            total[name] = total[name].add_(tensor) if name in total else tensor.double()
    return {name: (tensor / len(paths)).to(like[name].dtype) for name, tensor in total.items()}


@contextlib.contextmanager
def borrowed(live: Weights, weights: Weights) -> Iterator[None]:
    """Give the `live` tensors the values of `weights` inside the context, and restore them exactly on exit.

    Values are copied, not swapped, because optimizers and CUDA graphs keep the addresses.
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
        value = sharded_like(values[name], tensor)
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise ValueError(f"{name} is {value.dtype} {list(value.shape)}, not {tensor.dtype} {list(tensor.shape)}")
        tensor.copy_(value)


@dataclass(eq=False, repr=False)
class Average(ABC):
    """The weights that a run keeps. `live` are the model's own parameters by name; `folder` is for files."""

    live: Weights
    _: KW_ONLY
    folder: Path
    n: int
    decay: float
    ranks: Ranks = SINGLE_RANK
    n_copies: ClassVar[int] = 0
    """Copies of the weights in memory and in each checkpoint, beside the live ones."""
    keeps_last: ClassVar[bool] = False
    """Whether every validation writes the run's model, not only a better one; then it is a mean of files."""

    def __post_init__(self) -> None:  # noqa: B027 - optional
        """Make the initial state."""

    def after_update(self) -> None:  # noqa: B027 - optional
        """Use the live weights. Called after every update, so it must be cheap."""

    @abstractmethod
    def candidate(self, update: int) -> Weights:
        """The weights to validate after `update`, and to keep if they are better."""

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
class NoAverage(Average):
    """`none`: the live weights."""

    def candidate(self, update: int) -> Weights:
        return self.live


@final
class MovingAverage(Average):
    """`ema`: after every update, average <- decay * average + (1 - decay) * weights."""

    n_copies = 1

    def __post_init__(self) -> None:
        self.average = {name: tensor.detach().clone() for name, tensor in self.live.items()}
        self.count = 0

    @torch.no_grad()
    def after_update(self) -> None:
        share = 1.0 - decay_at(self.count, self.decay)
        average, live = ([shard_of(tensor) for tensor in weights.values()] for weights in (self.average, self.live))
        torch._foreach_lerp_(average, live, share)
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


@final
class MeanOfLast(Average):
    """`last`: the mean of the weights at the last `n` validations, whatever their scores."""

    keeps_last = True

    def __post_init__(self) -> None:
        self.kept: list[int] = []  # the updates

    def path(self, update: int) -> Path:
        return self.folder / f"u{update:08d}.safetensors"

    def candidate(self, update: int) -> Weights:
        weights = gather(self.live, keep=self.ranks.is_main_process)
        if weights:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_tensors(self.path(update), weights)
        self.ranks.agree(0, 0.0)  # the file is there
        earlier = [n for n in self.kept if n != update]  # a resumed run repeats a validation
        self.kept = [*earlier, update][-self.n :]
        return mean_of([self.path(update) for update in self.kept], self.live)

    def remove_unused(self, states: Iterable[Mapping[str, Any]]) -> None:
        updates = {*self.kept, *(update for state in states for update in state["kept"])}
        useful = {self.path(int(update)) for update in updates}
        for path in self.folder.glob("u*.safetensors"):
            if path not in useful:
                path.unlink(missing_ok=True)

    def state(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load(self, tensors: Weights, state: Mapping[str, Any]) -> list[str]:
        """Weights that are missing or damaged are left out, with a note for each."""
        self.kept, notes = [], []
        shapes = {name: tensor.shape for name, tensor in self.live.items()}
        for update in map(int, state["kept"]):
            path = self.path(update)
            try:
                if {name: tensor.shape for name, tensor in load_tensors(path).items()} != shapes:
                    raise RunFolderError(f"{path} is damaged: these are not the weights of this run")
                self.kept.append(update)
            except RunFolderError as error:
                notes.append(f"left out of the averaged weights: {error}")
        return notes


AVERAGES: dict[str, type[Average]] = {"none": NoAverage, "last": MeanOfLast, "ema": MovingAverage}
