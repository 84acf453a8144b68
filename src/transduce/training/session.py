"""Save the state of a training run in checkpoints, and restore it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any, final

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor, nn

from transduce.errors import RankExited
from transduce.logging import Log
from transduce.metrics_log import TrackedMetrics
from transduce.runs.atomic import expecting, remove_leftovers
from transduce.runs.checkpoints import Checkpoint, environment
from transduce.runs.folder import RunFolder
from transduce.runs.manifest import Change, format_changes, sealed_files
from transduce.runs.tensors import copy_shards, copy_to_cpu, gather, is_sharded, read_shards
from transduce.training.averaging import AVERAGES, copy_values
from transduce.training.feed import Count, DataPosition
from transduce.training.loss import Carry
from transduce.training.meter import Row
from transduce.training.ranks import Ranks, name_on_rank
from transduce.training.schedule import TimeLimit
from transduce.training.step import Updater

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(slots=True)
class TrainingState:
    """The progress of a run, as stored in checkpoints.

    `seconds` is the time of training over all restarts. `progress` is the used fraction of the nearest limit.
    """

    update: Count = 0
    position: DataPosition = field(default_factory=DataPosition)
    epochs: Amount = 0.0
    seconds: Amount = 0.0
    progress: Amount = 0.0
    factor: Amount = 0.0  # factor of the peak learning rate at the last update
    changes: Count = 0  # number of changes of settings that were applied
    since: Count = 0  # the update at which the training was continued at another learning rate
    began: Amount = 0.0  # seconds when the training was last continued
    reserve: Amount = 0.0  # seconds of the last validation with its saving
    validated: int = -1  # the update of the last validation
    scores: dict[str, float] = field(default_factory=dict)
    best_scores: dict[str, float] = field(default_factory=dict)  # scores of the best validation so far
    best_update: Count = 0
    since_best: Count = 0  # validations since the best
    finished: str = ""  # the reason why training ended; empty before
    skipped: Count = 0  # consecutive updates that were skipped, up to the last one
    rows: list[Row] = field(default_factory=list)  # updates that metrics.jsonl does not contain yet

    def see(self, scores: Mapping[str, float], by: str) -> bool:
        """Record the scores of a validation; return whether it is the best so far, by the score named `by`.

        If this validation or the best validation so far lacks this score, their losses are compared.
        """
        by = by if by in scores and by in self.best_scores else "loss"
        is_best = not self.best_scores or score_of(scores, by) > score_of(self.best_scores, by)
        if is_best:
            self.best_scores, self.best_update, self.since_best = dict(scores), self.update, 0
        else:
            self.since_best += 1
        return is_best


def score_of(scores: Mapping[str, float], by: str) -> tuple[float, float]:
    """Return the key by which validations are compared: the score `by`, then the negative loss; higher is better.

    If there is no such score, for example because nothing was translated, the loss decides alone.
    """
    return (scores[by] if by != "loss" and by in scores else -scores["loss"], -scores["loss"])


@final
class CheckpointWriter:
    """Writes one checkpoint at a time in a thread, in steps. Leaving the context waits for a step that has begun.

    A step begins after all ranks have completed the previous step. The main threads learn this from the agreement after
    each update, which also notices lost and stuck ranks. The writing threads do not communicate with other ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._step: Future[None] | None = None
        self._steps: list[Callable[[], None]] = []  # steps that have not begun; their number is equal in all ranks

    def start(self, *steps: Callable[[], None]) -> None:
        """Begin a checkpoint; the previous checkpoint must be complete. All ranks call this with equally many steps."""
        self._step, self._steps = self._pool.submit(steps[0]), [*steps[1:]]

    def agree(self, signal: int, seconds: float) -> tuple[int, float]:
        """Call `Ranks.agree`, and begin the next step if all ranks have completed theirs; return signal and seconds.

        Raises the error of a failed step.
        """
        is_writing = self._step is not None and not self._step.done()
        if self._step is not None and not is_writing:
            self._step.result()
        signal, seconds, are_writing = self.ranks.agree(signal, seconds, is_writing=is_writing)
        if self._steps and not are_writing:
            self._step = self._pool.submit(self._steps.pop(0))
        return signal, seconds

    def wait(self) -> None:
        """Wait until the checkpoint is complete in all ranks, which all call this. Raises the error of a failed step.

        No rank continues before all ranks are done, because torchrun ends the remaining ranks when one exits.
        """
        while self._step is not None:
            wait([self._step])
            is_last = not self._steps
            self.agree(0, 0.0)
            if is_last:
                self._step = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._pool.shutdown()
        if self._step is not None and not isinstance(error, RankExited):
            self._step.result()  # raises the error of the step instead of reporting that everything is saved


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that training changes, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class Session:
    """The changing state of a training run, and its run folder.

    A checkpoint contains the whole state, so that a resumed run continues bit for bit.
    """

    def __init__(self, model: nn.Module, folder: RunFolder, *, updater: Updater, log: Log) -> None:
        self.model, self.folder, self.updater, self.log = model, folder, updater, log
        self.settings = s = folder.settings.training
        self.ranks = updater.ranks
        self.live = dict(model.named_parameters()) if s.lora is None else trained_parameters(model)
        self.snapshots = folder.path / "averaging"
        self.average = AVERAGES[s.average](
            self.live, folder=self.snapshots, n=s.average_n, decay=s.ema_decay, ranks=self.ranks
        )
        self.metrics = TrackedMetrics(folder, active=self.ranks.is_main_process, warn=log.warn)
        self.state = TrainingState()
        self.changed = set[str]()  # names of settings that have changed since the checkpoint
        self.carry: Carry = ()
        self.time_limit: TimeLimit | None = None
        self.saved_update = -1
        self.writer, self.save_seconds = CheckpointWriter(self.ranks), 0.0
        # On a CPU, copies would take more memory, and another thread would take cores from training.
        self._writes_ahead = updater.device.type == "cuda" or self.ranks.in_step

    def save(self, seconds: float) -> None:
        """Write a checkpoint after `seconds` of training, and remove old checkpoints and files that only they needed.

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
            "environment": environment(),  # read here: the writing thread has another number of PyTorch threads
        }
        named = {f"{part}/{name}": tensor for part, values in parts.items() for name, tensor in values.items()}
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
            checkpoints.prune(max(1, self.settings.keep_checkpoints))
            self.average.remove_unused(saved["average"] for saved in checkpoints.states())
            self.save_seconds = time.monotonic() - began

    def save_model(self, weights: Mapping[str, Tensor]) -> None:
        """Write the run's model: its state dict, with the values of the trained parameters taken from `weights`.

        `weights` has one name for a tied parameter; the state dict has all its names. With `training.lora` the file
        contains only the trained parameters.
        """
        names = {id(parameter): name for name, parameter in self.live.items()}
        state, base = self.model.state_dict(keep_vars=True), None
        if self.settings.lora is not None:
            state = {key: value for key, value in state.items() if id(value) in names}
            base = sealed_files(self.folder.path / "tokens")["start.safetensors"]["sha256"]
        weights = gather(weights, keep=self.ranks.is_main_process)
        if self.ranks.is_main_process:
            tensors = {key: weights[names[id(value)]] if id(value) in names else value for key, value in state.items()}
            self.folder.save_model(tensors, base=base)

    def start_or_resume(self) -> None:
        """Restore the latest checkpoint and apply changed settings, or begin the training if there is no checkpoint."""
        if self.ranks.is_main_process:
            remove_leftovers(self.snapshots)
        self.time_limit = TimeLimit.read(self.folder)
        checkpoint = self.folder.checkpoints.latest()
        if checkpoint is None:
            self._start()
            return
        self.restore(checkpoint)
        if self._has_ended():
            return
        if not self._apply_changes():
            update = self.state.update
            self.metrics.append({"event": "restart", "update": update, "seconds": self.state.seconds})
            self.log.say(f"resuming after update {update}, epoch {self.state.epochs:.2f}")

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint. Raises `RunFolderError` if it is malformed or of another model."""
        with expecting(checkpoint.path, RuntimeError):  # PyTorch's error for shapes or dtypes that do not match
            state = checkpoint.state
            self.state = TypeAdapter(TrainingState).validate_python(state["training"])
            self._truncate_metrics(self.state.update, validated=self.state.validated == self.state.update)
            self.saved_update = self.state.update
            if self._has_ended():
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

    def _new_changes(self) -> list[Change]:
        """Return the changes of settings that were made after the restored state."""
        return self.folder.manifest.changes[self.state.changes :]

    def _has_ended(self) -> bool:
        """Whether the training has finished and has not been continued with new limits since."""
        return bool(self.state.finished) and not any(change.continues for change in self._new_changes())

    def _apply_changes(self) -> bool:
        """Update the state for changed settings, and log them; return whether a finished training is continued now."""
        state, begins = self.state, False
        logged = {event.get("number") for event in self.metrics.read() if event["event"] == "change"}
        for change in self._new_changes():
            state.changes += 1
            state.progress = 0.0  # computed again from the limits
            self.changed |= change.settings.keys()
            if change.settings.keys() & {"training.stop_by", "training.valid_bleu_sentences"}:
                self.average.compare_by_loss()
            if change.continues:
                state.finished, state.since_best, state.began = "", 0, state.seconds
                if "training.lr" in change.settings:
                    state.since = state.update
            if state.changes in logged:  # a process that was killed before its first checkpoint has logged it
                continue
            begins |= change.continues
            event = {"event": "change", "update": state.update, "seconds": state.seconds, "number": state.changes}
            self.metrics.append({**event, "continues": change.continues, "settings": change.settings})
            if not change.continues:
                self.log.say(f"at update {state.update:,}: {format_changes(change.settings)}")
        return begins

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
        n_weights = sum(parameter.numel() for parameter in self.model.parameters())
        start = {"event": "start", "update": 0, "seconds": 0.0, "parameters": n_weights, "torch": torch.__version__}
        threads = {"threads": torch.get_num_threads(), "processes": self.ranks.size}
        self.metrics.append({**start, "device": str(self.updater.device), **threads})
        self._apply_changes()
        if started_before:
            self.metrics.append({"event": "restart", "update": 0, "seconds": 0.0})
            self.log.say("starting again: the run was stopped before its first checkpoint")

    def _truncate_metrics(self, update: int, *, validated: bool = True) -> None:
        for note in self.metrics.truncate_after(update, validated=validated):
            self.log.warn(note)
