"""Progress and result of a training run, and the names of its tensors in a checkpoint."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transduce.errors import RunFolderError
from transduce.runs.atomic import expecting
from transduce.training.feed import Position

MOST_UPDATES = 1 << 40


@dataclass(slots=True)
class TrainingState:
    """The progress of a run. `seconds` includes all restarts; `progress` never falls."""

    update: int = 0
    position: Position = field(default_factory=Position)
    epochs: float = 0.0
    seconds: float = 0.0
    progress: float = 0.0
    reserve: float = 0.0  # seconds of the last validation with its saving
    validated: int = -1  # the update of the last validation
    scores: dict[str, float] = field(default_factory=dict)
    finished: str = ""  # the reason, once training is finished
    skipped: list[Position] = field(default_factory=list)  # batches to skip
    rollbacks: list[dict[str, Any]] = field(default_factory=list)  # an event for each rollback

    def json(self) -> dict[str, Any]:
        """The state, as JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> TrainingState:
        """Read JSON values; those of earlier versions may lack some fields. Raises `ValueError` or `TypeError`."""
        skipped = [Position(**one) for one in values.get("skipped", [])]
        state = cls(**{**values, "position": Position(**values["position"]), "skipped": skipped})
        counts, times = (
            [state.update, *(n for p in (state.position, *skipped) for n in (p.epoch, p.index))],
            ("epochs", "seconds", "progress", "reserve"),
        )
        if not all(type(n) is int and 0 <= n <= MOST_UPDATES for n in counts) or type(state.validated) is not int:
            raise ValueError("its numbers are not counts")
        if not all(isinstance(n := getattr(state, key), int | float) and 0 <= n < math.inf for key in times):
            raise ValueError("its times are not numbers")
        if not isinstance(state.finished, str) or not all(isinstance(n, int | float) for n in state.scores.values()):
            raise ValueError("its scores are not numbers")
        return state


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """How a run ended. `scores` are those of the last validation; `seconds` includes all restarts."""

    update: int
    epochs: float
    seconds: float
    reason: str
    best_update: int
    scores: dict[str, float]


def full_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's complete state dict, with the values of its parameters from `weights`.

    `weights` has the names of `model.named_parameters()`, where a tied parameter has one name only; in the state dict
    it has all its names.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = model.state_dict(keep_vars=True)
    return {key: weights[names[id(tensor)]] if id(tensor) in names else tensor for key, tensor in state.items()}


def join_parts(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Merge the tensors of several parts under the names `part/name`."""
    return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


@contextlib.contextmanager
def expect_this_run(path: Path) -> Iterator[None]:
    """Report `path` as damaged if the saved state restored inside the context is malformed or of another model."""
    try:
        with expecting(path):
            yield
    except RuntimeError as error:  # from PyTorch: shapes or types do not match
        reason = " ".join(str(error).split())[:100]
        raise RunFolderError(f"{path} is damaged: its tensors are not of this run ({reason})") from error


@torch.no_grad()
def restore_tensors(live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into those of the same names; `ValueError` if a shape or type differs."""
    for name, tensor in live.items():
        value = saved[name]
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise ValueError(f"{name} is {value.dtype} {list(value.shape)}, not {tensor.dtype} {list(tensor.shape)}")
        tensor.copy_(value)


def part_of(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """The tensors of one part, the inverse of `join_parts`."""
    start = f"{part}/"
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
