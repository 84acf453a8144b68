"""What a run knows about itself: where it is, how it ended, and its tensors under the names of a checkpoint."""

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
    """Where a run is. `seconds` are those of all restarts; `progress` never falls."""

    update: int = 0
    position: Position = field(default_factory=Position)
    epochs: float = 0.0
    seconds: float = 0.0
    progress: float = 0.0
    reserve: float = 0.0  # seconds that the last validation took, with its saving
    validated: int = -1  # the update of the last validation
    scores: dict[str, float] = field(default_factory=dict)
    finished: str = ""  # why, once it is
    skipped: list[Position] = field(default_factory=list)  # batches that are passed over
    rollbacks: list[dict[str, Any]] = field(default_factory=list)  # an event for each time that the run went back

    def json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> TrainingState:
        """From JSON, of an earlier version too, which knew less. `ValueError` or its like where it is not that."""
        skipped = [Position(**one) for one in values.get("skipped", [])]
        state = cls(**{**values, "position": Position(**values["position"]), "skipped": skipped})
        counts, times = (
            [state.update, *(n for p in (state.position, *skipped) for n in (p.epoch, p.index))],
            ("epochs", "seconds", "progress", "reserve"),
        )
        if not all(type(n) is int and 0 <= n <= MOST_UPDATES for n in counts) or type(state.validated) is not int:
            raise ValueError("its numbers are no counts")
        if not all(isinstance(n := getattr(state, key), int | float) and 0 <= n < math.inf for key in times):
            raise ValueError("its times are no numbers")
        if not isinstance(state.finished, str) or not all(isinstance(n, int | float) for n in state.scores.values()):
            raise ValueError("its scores are no numbers")
        return state


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """How a run ended. `scores` are those of its last validation; `seconds` count all restarts."""

    update: int
    epochs: float
    seconds: float
    reason: str
    best_update: int
    scores: dict[str, float]


def full_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's whole state dict with the parameters' values from `weights`; a tied one under each of its names.

    `weights` goes by the names of `model.named_parameters()`, where a tied parameter has its first name only.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = model.state_dict(keep_vars=True)
    return {key: weights[names[id(tensor)]] if id(tensor) in names else tensor for key, tensor in state.items()}


def join_parts(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of several parts in one mapping: `part/name`."""
    return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


@contextlib.contextmanager
def expect_this_run(path: Path) -> Iterator[None]:
    """Inside, a saved state is taken up: where it is not of this model, or of no form, `path` is told to be damaged."""
    try:
        with expecting(path):
            yield
    except RuntimeError as error:  # PyTorch's, of shapes and types that do not fit
        told = " ".join(str(error).split())[:100]
        raise RunFolderError(f"{path} is damaged: its tensors are not of this run ({told})") from error


@torch.no_grad()
def restore_tensors(live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into those of the same names; `ValueError` where one has another shape or type."""
    for name, tensor in live.items():
        value = saved[name]
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            found = f"{value.dtype} {list(value.shape)}", f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{name} is {found[0]}, not {found[1]}")
        tensor.copy_(value)


def part_of(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """The tensors of one part of what `join_parts` made."""
    start = f"{part}/"
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
