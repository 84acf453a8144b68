"""A training run's state: what a checkpoint contains, how it is saved and how it is restored."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from transduce.logging import Log
from transduce.metrics_log import MetricsFile, NoMetrics
from transduce.runs.atomic import remove_leftovers
from transduce.runs.checkpoints import Checkpoint
from transduce.runs.folder import RunFolder
from transduce.training import rollback
from transduce.training.averaging import AVERAGES
from transduce.training.criteria import Carry
from transduce.training.loss_spikes import Watch
from transduce.training.meter import Meter
from transduce.training.ranks import Ranks, name_on_rank
from transduce.training.state import TrainingState, expect_this_run, join_parts, part_of, restore_tensors
from transduce.training.step import Updater
from transduce.training.stopping import Stopper
from transduce.training.time_limit import TimeLimit


class Session:
    """Everything of a run that changes while it trains, and its run folder.

    A checkpoint contains all of it, so that a resumed run continues bit for bit.
    """

    def __init__(self, model: nn.Module, folder: RunFolder, *, updater: Updater, log: Log) -> None:
        self.model, self.folder, self.updater, self.log = model, folder, updater, log
        self.settings = s = folder.settings.training
        self.ranks: Ranks = updater.ranks
        is_main = self.ranks.is_main_process
        self.live = dict(model.named_parameters())
        self.snapshots = folder.path / "averaging"
        self.average = AVERAGES[s.average if is_main else "none"](
            self.live, folder=self.snapshots, n=s.average_n, decay=s.ema_decay
        )
        self.stopper = Stopper(by=s.stop_by, patience=s.patience)
        self.metrics = (MetricsFile if is_main else NoMetrics)(folder.path / "metrics.jsonl")
        self.meter = Meter(watch=Watch(s.explosion))
        self.state = TrainingState()
        self.carry: Carry = ()
        self.time_limit: TimeLimit | None = None
        self.saved_update = -1

    def save(self, seconds: float) -> None:
        """Write a checkpoint and remove what no checkpoint needs any more."""
        self.ranks.check_equal(self.live)
        self.meter.settle()
        self.state.seconds = seconds
        tensors, updater = self.updater.state()
        parts: dict[str, Mapping[str, Tensor]] = {
            "model": self.live,
            "updater": tensors,
            "average": self.average.tensors(),
            "carry": self.ranks.gather({f"{i}": part.cpu() for i, part in enumerate(self.carry)}),
        }
        state = {
            "training": self.state.json(),
            "updater": updater,
            "average": self.average.state(),
            "stopper": self.stopper.state(),
            "meter": self.meter.state(),
            "watch": self.meter.watch.state(),
            "metrics": self.metrics.mark(),
            "carry": len(self.carry),
        }
        checkpoints, s = self.folder.checkpoints, self.settings
        if self.ranks.is_main_process:
            checkpoints.save(self.state.update, join_parts(parts), state)
            checkpoints.prune(s.keep_checkpoints, spare=rollback.worth_keeping(checkpoints.updates(), s))
        self.average.saved(found["average"] for found in checkpoints.states())
        self.ranks.barrier()
        self.saved_update = self.state.update

    def start_or_resume(self) -> bool:
        """Restore the latest checkpoint; whether there was one."""
        if self.snapshots.is_dir() and self.ranks.is_main_process:
            remove_leftovers(self.snapshots)
        self.time_limit = TimeLimit.read(self.folder)
        checkpoint = self.folder.checkpoints.latest()
        if checkpoint is None:
            self._start()
            return False
        self.restore(checkpoint)
        if not self.state.finished:
            update = self.state.update
            self.metrics.append({"event": "restart", "update": update, "seconds": self.state.seconds})
            self.log.say(f"resuming after update {update}, epoch {self.state.epochs:.2f}")
        return True

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint; one of another model, or a malformed one, is a `RunFolderError`."""
        with expect_this_run(checkpoint.path):
            self._restore(checkpoint)

    def _restore(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        self.state = TrainingState.of(state["training"])
        self.stopper.load(state["stopper"])
        if "metrics" in state and not self.metrics.begins_with(state["metrics"]):
            self.log.warn(f"{self.metrics.path}: lines were lost or changed; curves of the report may have gaps")
        self._truncate_metrics(self.state.update)
        for event in rollback.missing_events(self.metrics.read(), self.state.rollbacks):
            self.metrics.append(event)
        self.saved_update = self.state.update
        if self.state.finished:
            return
        tensors = checkpoint.tensors()
        restore_tensors(self.live, part_of(tensors, "model"))
        notes = self.updater.load_state(part_of(tensors, "updater"), state["updater"], self.state.update)
        notes += self.average.load(part_of(tensors, "average"), state["average"])
        notes += self._restore_carry(part_of(tensors, "carry"), int(state.get("carry", 0)))
        self.meter.load(state["meter"])
        self.meter.watch.load(state.get("watch", {}))
        for note in (*checkpoint.notes, *notes):
            self.log.warn(note)

    def _restore_carry(self, tensors: Mapping[str, Tensor], n: int) -> list[str]:
        if n and len(tensors) != n * self.ranks.size:
            self.carry = ()
            return ["the run had another number of processes: the state carried between batches starts anew"]
        names = [name_on_rank(f"{i}", self.ranks.rank) for i in range(n)]
        self.carry = tuple(tensors[name].to(self.updater.device) for name in names)
        return []

    def _start(self) -> None:
        started_before = any(event["event"] == "start" for event in self.metrics.read())
        self._truncate_metrics(-1)
        n_weights = sum(parameter.numel() for parameter in self.live.values())
        start = {"event": "start", "update": 0, "seconds": 0.0, "parameters": n_weights, "torch": torch.__version__}
        threads = {"threads": torch.get_num_threads(), "processes": self.ranks.size}
        self.metrics.append({**start, "device": str(self.updater.device), **threads})
        self.ranks.seed_dropout(self.settings.seed)
        if started_before:
            self.metrics.append({"event": "restart", "update": 0, "seconds": 0.0})
            self.log.say("starting again: the run was stopped before its first checkpoint")

    def _truncate_metrics(self, update: int) -> None:
        for note in self.metrics.truncate_after(update):
            self.log.warn(note)
