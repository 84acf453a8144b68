"""Averages of the weights over training: a moving average in memory, or the mean of snapshots in files.

The setting `training.average` decides which weights become the run's model. Its values are the keys of AVERAGES:

- `none`: the weights at the best validation;
- `ema`: the exponential moving average at the best validation;
- `last`: the mean of the weights at the last `average_n` validations, whatever their scores (the paper's section 6.1
  averages the last 5 to 20 checkpoints);
- `best`: the mean of the weights at the `average_n` best validations.

Means are computed from files, so that at most two copies of the weights are in memory. A validation scores the weights
that would become the run's model; with `best` it scores the current weights.
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
from torch.optim.swa_utils import get_ema_multi_avg_fn

from transduce.errors import RunFolderError
from transduce.runs.manifest import Fingerprint, check_file, fingerprint
from transduce.runs.tensors import gather, load_tensors, save_tensors, shard_of, sharded_like
from transduce.training.ranks import SINGLE_RANK, Ranks

Weights = Mapping[str, Tensor]
Score = tuple[float, float]
"""The key by which validations are compared; see `session.score_of`."""


def decay_at(n: int, decay: float) -> float:
    """Return the decay of the moving average at update `n`, from 0: `decay`, but at most (1 + n) / (10 + n).

    Without this warm-up, the random initial weights would remain in the average for long.
    """
    return min(decay, (1 + n) / (10 + n))


def mean_of(paths: Sequence[Path], like: Weights) -> dict[str, Tensor]:
    """Compute the mean of the weights in several files, summed in float64 and rounded once.

    Files are loaded one by one. `like`: tensors whose types and sharding the result has.
    """
    total: dict[str, Tensor] = {}
    for path in paths:
        for name, whole in load_tensors(path).items():
            tensor = sharded_like(whole, like[name])
            total[name] = total[name].add_(tensor) if name in total else tensor.double()
    return {name: (tensor / len(paths)).to(like[name].dtype) for name, tensor in total.items()}


@contextlib.contextmanager
def borrowed(live: Weights, weights: Weights) -> Iterator[None]:
    """Give the `live` tensors the values of `weights` inside the `with` block, and restore them exactly on exit.

    Values are copied, because optimizers and CUDA graphs keep the addresses of the `live` tensors.
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
    """Copy `values` in place into the tensors `into`, name by name; raise `ValueError` if a shape or type differs."""
    for name, tensor in into.items():
        value = sharded_like(values[name], tensor)
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise ValueError(f"{name} is {value.dtype} {list(value.shape)}, not {tensor.dtype} {list(tensor.shape)}")
        tensor.copy_(value)


@dataclass(eq=False, repr=False)
class Average(ABC):
    """Base of the values of `training.average`, which decide which weights become the run's model.

    live: the model's own parameters, by name. folder: folder for files of weights. n: number of averaged validations
    (`training.average_n`). decay: decay of the moving average (`training.ema_decay`).
    """

    live: Weights
    _: KW_ONLY
    folder: Path
    n: int
    decay: float
    ranks: Ranks = SINGLE_RANK
    n_copies: ClassVar[int] = 0
    """Number of copies of the weights in memory and in each checkpoint, in addition to the model's own weights."""
    is_mean: ClassVar[bool] = False
    """Whether the run's model is a mean of files, which changes even after a validation that is not the best."""

    def __post_init__(self) -> None:  # noqa: B027 - optional
        """Make the initial state."""

    def after_update(self) -> None:  # noqa: B027 - optional
        """Add the current weights to the average. Called after every update, so it must be cheap."""

    @abstractmethod
    def candidate(self, update: int) -> Weights:
        """Return the weights to validate after update number `update`."""

    def chosen(self, update: int, candidate: Weights, score: Score, *, is_best: bool) -> Weights | None:
        """Return the run's new model after the validation of `candidate`, or None to keep the previous model.

        `is_best`: whether the validation is the best so far.
        """
        return candidate if is_best else None

    def compare_by_loss(self) -> None:  # noqa: B027 - optional
        """Compare earlier validations by loss alone from now on, because later validations have another score."""

    def remove_unused(self, states: Iterable[Mapping[str, Any]]) -> None:  # noqa: B027 - optional
        """Remove files to which no checkpoint refers. `states`: the states of all checkpoints on disk."""

    def tensors(self) -> Weights:
        """Return the tensors of the state, for a checkpoint."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the rest of the state, as JSON values, for a checkpoint."""
        return {}

    def load(self, tensors: Weights, state: Mapping[str, Any]) -> list[str]:
        """Restore a saved state; return notes for the user on parts that could not be restored."""
        return []


@final
class NoAverage(Average):
    """`none`: the current weights at the best validation, without an average."""

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
        average, live = ([shard_of(tensor) for tensor in weights.values()] for weights in (self.average, self.live))
        get_ema_multi_avg_fn(decay_at(self.count, self.decay))(average, live, self.count)
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


class MeanOfFiles(Average):
    """Base of means over the weights at several validations; the weights are kept in files."""

    is_mean = True

    def __post_init__(self) -> None:
        self.kept: list[int] = []  # updates whose weights are kept
        self.files: dict[str, Fingerprint] = {}  # files of snapshots, in the main process

    def path(self, update: int) -> Path:
        return self.folder / f"u{update:08d}.safetensors"

    def _add(self, update: int) -> None:
        """Write the current weights to a file, and add the number of the update to `kept`."""
        weights = gather(self.live, keep=self.ranks.is_main_process)
        if weights:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_tensors(self.path(update), weights)
            self.files[self.path(update).name] = fingerprint(self.path(update))
        self.ranks.agree(0, 0.0)  # wait until the file exists
        self.kept = [*(n for n in self.kept if n != update), update]  # a resumed run may repeat this validation

    def _mean(self) -> Weights:
        names = {self.path(n).name for n in self.kept}
        self.files = {name: was for name, was in self.files.items() if name in names}
        return mean_of([self.path(update) for update in self.kept], self.live)

    def remove_unused(self, states: Iterable[Mapping[str, Any]]) -> None:
        updates = {*self.kept, *(update for state in states for update in state["kept"])}
        useful = {self.path(int(update)) for update in updates}
        for path in self.folder.glob("u*.safetensors"):
            if path not in useful:
                path.unlink(missing_ok=True)

    def state(self) -> dict[str, Any]:
        return {"kept": self.kept, "files": self.files}

    def load(self, tensors: Weights, state: Mapping[str, Any]) -> list[str]:
        """Restore a saved state without the files that are missing or damaged; return a note for each."""
        self.kept, self.files, notes = [], dict(state["files"]), []
        for update in map(int, state["kept"]):
            path = self.path(update)
            try:
                check_file(path, self.files[path.name])
                self.kept.append(update)
            except RunFolderError as error:
                notes.append(f"left out of the averaged weights: {error}")
        return notes


@final
class MeanOfLast(MeanOfFiles):
    """`last`: the mean of the weights at the last `n` validations, whatever their scores."""

    def candidate(self, update: int) -> Weights:
        self._add(update)
        self.kept = self.kept[-self.n :]
        return self._mean()

    def chosen(self, update: int, candidate: Weights, score: Score, *, is_best: bool) -> Weights | None:
        return candidate


@final
class MeanOfBest(MeanOfFiles):
    """`best`: the mean of the weights at the `n` best validations. Of equal scores, the earliest is the best."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scores: dict[int, Score] = {}  # by update, of kept weights

    def candidate(self, update: int) -> Weights:
        return self.live

    def chosen(self, update: int, candidate: Weights, score: Score, *, is_best: bool) -> Weights | None:
        scores = {**self.scores, update: score}
        only_loss = any(by == loss for by, loss in scores.values())  # a validation without other score: compare losses
        best = sorted(sorted(scores), key=lambda n: scores[n][only_loss:], reverse=True)[: self.n]
        self.scores = {n: scores[n] for n in best}
        if update not in best:
            return None
        self._add(update)
        self.kept = [n for n in self.kept if n in best]
        return self._mean()

    def compare_by_loss(self) -> None:
        self.scores = {n: (loss, loss) for n, (_, loss) in self.scores.items()}

    def state(self) -> dict[str, Any]:
        return {**super().state(), "scores": [[n, *self.scores[n]] for n in self.kept]}

    def load(self, tensors: Weights, state: Mapping[str, Any]) -> list[str]:
        notes = super().load(tensors, state)
        self.scores = {int(n): (float(by), float(loss)) for n, by, loss in state["scores"] if n in self.kept}
        return notes


AVERAGES: dict[str, type[Average]] = {
    "none": NoAverage,
    "last": MeanOfLast,
    "best": MeanOfBest,
    "ema": MovingAverage,
}
