"""A training run's state: what a checkpoint contains, how it is saved and how it is restored."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor, nn

from transduce.logging import Log
from transduce.metrics_log import TrackedMetrics
from transduce.runs.atomic import expecting, remove_leftovers
from transduce.runs.checkpoints import Checkpoint, environment
from transduce.runs.folder import RunFolder
from transduce.runs.shards import copy_shards, copy_to_cpu, gather, is_sharded, read_shards
from transduce.training.averaging import AVERAGES, copy_values
from transduce.training.feed import Count, DataPosition
from transduce.training.loss import Carry
from transduce.training.meter import Row
from transduce.training.ranks import name_on_rank
from transduce.training.schedule import TimeLimit
from transduce.training.step import Updater
from transduce.training.writer import CheckpointWriter

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(slots=True)
class TrainingState:
    """The progress of a run. `seconds` includes all restarts; `progress` never falls."""

    update: Count = 0
    position: DataPosition = field(default_factory=DataPosition)
    epochs: Amount = 0.0
    seconds: Amount = 0.0
    progress: Amount = 0.0
    reserve: Amount = 0.0  # seconds of the last validation with its saving
    validated: int = -1  # the update of the last validation
    scores: dict[str, float] = field(default_factory=dict)
    best: tuple[float, float] | None = None  # the key (`score_of`) of the best validation so far
    best_update: Count = 0
    since_best: Count = 0  # validations
    finished: str = ""  # the reason, once training is finished
    skipped: Count = 0  # the number of last updates, one after the other, that were skipped
    rows: list[Row] = field(default_factory=list)  # the updates that are not in the log yet

    def see(self, scores: Mapping[str, float], by: str) -> bool:
        """Count a validation of this update; return whether it is the best so far."""
        score = score_of(scores, by)
        is_best = self.best is None or score > self.best
        if is_best:
            self.best, self.best_update, self.since_best = score, self.update, 0
        else:
            self.since_best += 1
        return is_best


def score_of(scores: Mapping[str, float], by: str) -> tuple[float, float]:
    """The key to compare validations by; higher is better. It is the score `by`, then the negative loss.

    If there is no such score, for example because nothing was translated, the loss decides alone.
    """
    return (scores[by] if by != "loss" and by in scores else -scores["loss"], -scores["loss"])


class Session:
    """Everything of a run that changes while it trains, and its run folder.

    A checkpoint contains all of it, so that a resumed run continues bit for bit.
    """

    def __init__(self, model: nn.Module, folder: RunFolder, *, updater: Updater, log: Log) -> None:
        self.model, self.folder, self.updater, self.log = model, folder, updater, log
        self.settings = s = folder.settings.training
        self.ranks, self.live = updater.ranks, dict(model.named_parameters())
        self.snapshots = folder.path / "averaging"
        self.average = AVERAGES[s.average](
            self.live, folder=self.snapshots, n=s.average_n, decay=s.ema_decay, ranks=self.ranks
        )
        self.metrics = TrackedMetrics(folder, active=self.ranks.is_main_process, warn=log.warn)
        self.state = TrainingState()
        self.carry: Carry = ()
        self.time_limit: TimeLimit | None = None
        self.saved_update = -1
        self.writer, self.save_seconds = CheckpointWriter(self.ranks), 0.0
        # On a CPU, copies would need memory that is not needed yet, and another thread the cores that train.
        self._writes_ahead = updater.device.type == "cuda" or self.ranks.in_step

    def save(self, seconds: float) -> None:
        """Write a checkpoint and remove what no checkpoint needs any more.

        If the weights are on a GPU or sharded, `writer` writes a copy of them while training continues.
        """
        self.writer.wait()
        began = time.monotonic()
        self.ranks.check_equal(self.live)
        self.state.seconds = seconds
        tensors, updater = self.updater.state()
        parts: dict[str, Mapping[str, Tensor]] = {
            "model": self.live,
            "updater": tensors,
            "average": self.average.tensors(),
            "carry": self.ranks.gather({f"{i}": part.cpu() for i, part in enumerate(self.carry)}),
        }
        state = {
            "training": asdict(self.state),
            "updater": updater,
            "average": self.average.state(),
            "carry": len(self.carry),
            "environment": environment(),  # the writing thread has other numbers of threads
        }
        named = {f"{part}/{name}": tensor for part, one in parts.items() for name, tensor in one.items()}
        shards = {name: tensor for name, tensor in named.items() if is_sharded(tensor)}
        whole = {name: tensor for name, tensor in named.items() if name not in shards}
        if self._writes_ahead and self.ranks.is_main_process:
            whole = copy_to_cpu(whole)
        write = partial(self._write, whole, state, update=self.state.update, began=began)
        if shards:
            folder = self.folder.checkpoints.shards(self.state.update)
            self.writer.start(copy_shards(folder / f"{self.ranks.rank:05d}.safetensors", shards), write)
        elif self._writes_ahead:
            self.writer.start(write)
        else:
            write()
        self.saved_update = self.state.update

    def _write(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, update: int, began: float) -> None:
        if self.ranks.is_main_process:
            checkpoints = self.folder.checkpoints
            checkpoints.save(update, tensors, state)
            self.metrics.sync()
            checkpoints.prune(self.settings.keep_checkpoints)
            self.average.remove_unused(found["average"] for found in checkpoints.states())
            self.save_seconds = time.monotonic() - began

    def save_model(self, weights: Mapping[str, Tensor]) -> None:
        """Write the run's model: its state dict, with the values of its parameters from `weights`.

        `weights` has one name for a tied parameter; in the state dict it has all its names.
        """
        names = {id(parameter): name for name, parameter in self.live.items()}
        state = self.model.state_dict(keep_vars=True)
        weights = gather(weights, keep=self.ranks.is_main_process)
        if self.ranks.is_main_process:
            self.folder.save_model(
                {key: weights[names[id(value)]] if id(value) in names else value for key, value in state.items()}
            )

    def start_or_resume(self) -> None:
        """Restore the latest checkpoint, if there is one."""
        if self.ranks.is_main_process:
            remove_leftovers(self.snapshots)
        self.time_limit = TimeLimit.read(self.folder)
        checkpoint = self.folder.checkpoints.latest()
        if checkpoint is None:
            self._start()
            return
        self.restore(checkpoint)
        if not self.state.finished:
            update = self.state.update
            self.metrics.append({"event": "restart", "update": update, "seconds": self.state.seconds})
            self.log.say(f"resuming after update {update}, epoch {self.state.epochs:.2f}")

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint; one of another model, or a malformed one, is a `RunFolderError`."""
        with expecting(checkpoint.path, RuntimeError):  # PyTorch's, if shapes or types do not match
            state = checkpoint.state
            self.state = TypeAdapter(TrainingState).validate_python(state["training"])
            self._truncate_metrics(self.state.update, validated=self.state.validated == self.state.update)
            self.saved_update = self.state.update
            if self.state.finished:
                return
            parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
            tensors = checkpoint.tensors() | read_shards(checkpoint.path, next(iter(self.live.values())))
            for name, tensor in tensors.items():
                part, _, own = name.partition("/")
                parts[part][own] = tensor
            copy_values(self.live, parts["model"])
            n = self.state.update
            notes = self.updater.load_state(parts["updater"], state["updater"], n_updates=n)
            notes += self.average.load(parts["average"], state["average"])
            notes += self._restore_carry(parts["carry"], int(state["carry"]))
            for note in (*checkpoint.notes, *notes):
                self.log.warn(note)

    def _restore_carry(self, tensors: Mapping[str, Tensor], n: int) -> list[str]:
        if n and len(tensors) != n * self.ranks.size:
            self.carry = ()
            return [
                "the run had another number of processes: the state carried between batches starts anew, and the rest "
                "of this epoch reads the text in other streams, some of it twice or not at all"
            ]
        names = [name_on_rank(f"{i}", self.ranks.rank) for i in range(n)]
        # Copied, because MKL rounds some products differently if the operands are not aligned.
        self.carry = tuple(tensors[name].to(self.updater.device, copy=True) for name in names)
        return []

    def _start(self) -> None:
        started_before = any(event["event"] == "start" for event in self.metrics.read())
        self._truncate_metrics(-1)
        n_weights = sum(parameter.numel() for parameter in self.live.values())
        start = {"event": "start", "update": 0, "seconds": 0.0, "parameters": n_weights, "torch": torch.__version__}
        threads = {"threads": torch.get_num_threads(), "processes": self.ranks.size}
        self.metrics.append({**start, "device": str(self.updater.device), **threads})
        if started_before:
            self.metrics.append({"event": "restart", "update": 0, "seconds": 0.0})
            self.log.say("starting again: the run was stopped before its first checkpoint")

    def _truncate_metrics(self, update: int, *, validated: bool = True) -> None:
        for note in self.metrics.truncate_after(update, validated=validated):
            self.log.warn(note)
