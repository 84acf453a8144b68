"""The training loop: update, log, validate, keep, save; it stops at a limit, and goes on exactly where it was stopped.

What is exact: a run that was killed at any moment and started again gives, with limits in updates or epochs, the same
losses and the same final weights, bit for bit, as one that was left alone: on a CPU, on the same machine with as many
threads. A GPU adds in no fixed order, so there it is equal up to rounding. With a limit in minutes the schedule follows
the clock, so there it is equal in kind only.

What is never lost: the last checkpoint, and the weights of the last validation that were worth keeping
(`model.safetensors`). Both are written aside and renamed.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from transduce.errors import Interrupted, TrainingError
from transduce.logging import Bar, Log
from transduce.metrics_log import MetricsFile, NoMetrics
from transduce.runs.atomic import remove_leftovers
from transduce.runs.checkpoints import Checkpoint
from transduce.runs.folder import RunFolder
from transduce.text.tokenizer import load_tokenizers
from transduce.training import rollback
from transduce.training.averaging import AVERAGES, borrowed
from transduce.training.feed import Feed, Feeder, Position, ahead
from transduce.training.loss_spikes import BadLoss, Watch
from transduce.training.meter import LATENCY, Meter, Pace, Row
from transduce.training.ranks import Link
from transduce.training.schedule import Clock, Limits, Moment, find_schedule
from transduce.training.state import TrainingResult, TrainingState, full_weights, joined, of_this_run, part_of, put_back
from transduce.training.step import DoesNotFit, Updater, UpdateResult, give_back_memory
from transduce.training.stopping import Stopper, StopRequest, score_of, stop_on_signals
from transduce.training.validate import Validator, line_of

SAVE_SECONDS = 600.0  # a checkpoint at least this often, however far validations lie apart


def train(
    model: nn.Module,
    folder: RunFolder,
    *,
    updater: Updater,
    feeder: Feeder,
    validator: Validator,
    log: Log,
    log_updates: int = LATENCY,
) -> TrainingResult:
    """Train `model` in `folder` from its latest checkpoint, or from the start, to the end that its settings ask for.

    At the end `model.safetensors` holds the weights that `training.average` asks for. Raises `Interrupted` after
    SIGINT, SIGTERM or SIGHUP (everything is saved), `TrainingError` when a loss is not finite or explodes and
    `training.on_bad_loss` does not say otherwise, or when one sentence does not fit into memory, `RunFolderError` when
    the disk fails.
    """
    trainer = Trainer(model, folder, updater=updater, feeder=feeder, validator=validator, log=log)
    trainer.log_updates = log_updates
    return trainer.run()


class Trainer:
    """The loop and its state; `train` is how to use it."""

    log_updates = LATENCY

    def __init__(
        self, model: nn.Module, folder: RunFolder, *, updater: Updater, feeder: Feeder, validator: Validator, log: Log
    ) -> None:
        self.model, self.folder, self.log = model, folder, log
        self.updater, self.feeder, self.validator = updater, feeder, validator
        self.settings = s = folder.settings.training
        self.link: Link = updater.link
        assert s.schedule is not None and s.warmup_updates is not None and s.valid_updates is not None, "choose first"
        self.schedule, self.warmup, self.valid_updates = find_schedule(s.schedule), s.warmup_updates, s.valid_updates
        self.limits = Limits.of(s)
        self.live = dict(model.named_parameters())
        self.snapshots = folder.path / "averaging"
        average = AVERAGES[s.average if self.link.leads else "none"]
        self.average = average(self.live, folder=self.snapshots, n=s.average_n, decay=s.ema_decay)
        self.stopper = Stopper(by=s.stop_by, patience=s.patience)
        self.metrics = (MetricsFile if self.link.leads else NoMetrics)(folder.path / "metrics.jsonl")
        self.state, self.clock, self.pace = TrainingState(), Clock(), Pace(0.0)
        self.meter = Meter(watch=Watch(s.explosion))
        self._saved_at = self._save_seconds = 0.0
        self._shown: dict[str, float] = {}  # loss and speed of the last line, for the bar

    def run(self) -> TrainingResult:
        """Train to the end."""
        with stop_on_signals(self.log.say) as own:
            asked = self.link.shared(own)
            self._take_up()
            if not self.state.finished:
                with self.log.progress("training") as bar:
                    self._updates(bar, asked)
            result = self._end()
            if asked:  # during the last validation: what follows training can wait for the same command
                raise self._interrupted(asked)
            return result

    # -- the way through the updates

    def _updates(self, bar: Bar, asked: StopRequest) -> None:
        """To the end, going back as often as there is a bad loss that may be gone back from."""
        while True:
            try:
                return self._straight(bar, asked)
            except BadLoss as error:
                bad = error
            self._recover(bad)  # here nothing holds on to the tensors of the way before

    def _straight(self, bar: Bar, asked: StopRequest) -> None:
        state = self.state
        self.model.train()
        if self.settings.start is not None and state.validated < 0:
            self._validate(bar)  # what it begins with: whether training makes it better shows from there
            self.model.train()
        feeds_from_here = self.feeder.feeds(state.position, skip=frozenset(state.skipped))
        with ahead(feeds_from_here, n=2 if self.feeder.device.type == "cuda" else 0) as feeds:
            while not (reason := self._reason_to_end()):
                self._update(next(feeds))
                bar.update(state.progress, **self._shown, note=f"update {state.update}")
                if state.update % self.valid_updates == 0:
                    self._validate(bar)
                elif asked or self._is_time_to_save():
                    self._save()
                if asked:
                    raise self._interrupted(asked)
        if state.validated != state.update:
            self._validate(bar, finished=reason)
        else:
            state.finished = reason
            self._save()

    def _is_time_to_save(self) -> bool:
        late = self.clock.seconds() - self._saved_at > SAVE_SECONDS
        return late or rollback.is_regular(self.state.update, self.settings)

    def _reason_to_end(self) -> str:
        """Why training is over, or nothing. Brings the progress up to date."""
        state, limits, seconds = self.state, self.limits, self.clock.seconds()
        used = limits.progress(updates=state.update, epochs=state.epochs, seconds=seconds, reserve=state.reserve)
        state.progress = max(state.progress, used)
        if self.stopper.exhausted:
            by = self.settings.stop_by if self.settings.stop_by in state.scores else "loss"
            return f"no better {by} in {self.settings.patience} validations"
        if state.progress < 1.0:
            return ""
        if limits.updates is not None and state.update >= limits.updates:
            return "max_updates"
        return "max_epochs" if limits.epochs is not None and state.epochs >= limits.epochs else "max_minutes"

    def _update(self, feed: Feed) -> None:
        state = self.state
        factor = self.schedule(Moment(state.update, state.progress, self.warmup))
        result = self._fitted(feed, factor)
        self.average.after_update()
        state.update, state.position, state.epochs = state.update + 1, feed.after, feed.epochs
        lr = self.updater.optimizer.param_groups[-1]["lr"]  # of embeddings and norms where matrices have their own
        row = Row(state.update, lr, feed.n_targets, feed.n_tokens, feed.n_slots)
        self.meter.add(row, (result.loss_sum, result.nll_sum, result.grad_norm), feed.at)
        self.pace.add(feed.n_targets)
        if state.update % self.log_updates == 0:
            self._write_line()

    def _fitted(self, feed: Feed, factor: float) -> UpdateResult:
        """The update, by smaller batches where memory does not suffice: that is told, once for each size."""
        updater, limit = self.updater, self.updater.too_large
        try:
            return updater.update(feed.batches, factor, feed.n_targets)
        except DoesNotFit as error:
            text = load_tokenizers(self.folder).src.decode(error.batch.inputs[0][0].tolist())
            if alone := self.link.size == 1:  # others do not know yet, and could not save
                self._save()
            raise rollback.too_long(error, text, self.state.update + 1, saved=alone) from None
        finally:
            if updater.too_large is not None and updater.too_large != limit:
                update = self.state.update + 1
                self.metrics.append({"event": "memory", "update": update, "too_large": updater.too_large})
                self.log.warn(rollback.now_cut(update, updater.too_large))

    def _write_line(self) -> None:
        self.meter.settle()
        line, now = self.meter.line(), self.clock.seconds()
        speed = self.pace.restart(now)
        self.metrics.append(
            {"event": "update", "seconds": now, "epoch": self.state.epochs, "tokens_per_second": speed, **line}
        )
        self._shown = {"loss": line["loss"], "tokens_per_second": speed}

    # -- validation and saving

    def _validate(self, bar: Bar, *, finished: str = "") -> None:
        """Score the candidate weights, write the model if they are worth it, and save."""
        state, began = self.state, self.clock.seconds()
        self.meter.settle()
        bar.update(state.progress, **self._shown, note="validating")
        with borrowed(self.live, self.average.candidate(state.update) if state.update else None):
            scores = self.link.tell(self.validator)
        if not math.isfinite(scores["loss"]):
            raise TrainingError(f"the validation loss after update {state.update} is not finite; {rollback.ADVICE}")
        better = self.stopper.see(state.update, scores)
        score = score_of(scores, self.settings.stop_by)[0]
        kept = self.average.keep(state.update, score, better=better) if state.update else self.live
        if kept is not None:
            self.folder.save_model(full_weights(self.model, kept))
        seconds = self.clock.seconds() - began
        event = {"event": "validation", "update": state.update, "seconds": self.clock.seconds(), "epoch": state.epochs}
        self.metrics.append({**event, **scores, "validation_seconds": seconds, "best": better})
        self.log.say(line_of(state.update, state.epochs, scores, better=better))
        state.validated, state.scores, state.finished = state.update, scores, finished
        state.reserve = seconds + self._save_seconds
        self.pace.pause(seconds)
        self._save()
        give_back_memory()

    def _save(self) -> None:
        """Write a checkpoint; clear what no checkpoint needs any more."""
        self.link.check_equal(self.live)
        began = self.clock.seconds()
        self.meter.settle()
        self.state.seconds = began
        tensors, updater = self.updater.state()
        parts: dict[str, Mapping[str, Tensor]] = {
            "model": self.live,
            "updater": tensors,
            "average": self.average.tensors(),
        }
        state = {
            "training": self.state.json(),
            "updater": updater,
            "average": self.average.state(),
            "stopper": self.stopper.state(),
            "meter": self.meter.state(),
            "watch": self.meter.watch.state(),
            "metrics": self.metrics.mark(),
        }
        folder, s = self.folder, self.settings
        folder.save_checkpoint(self.state.update, joined(parts), state)
        folder.prune(s.keep_checkpoints, spare=rollback.worth_keeping(folder.checkpoints.updates(), s))
        self.average.saved(found["average"] for found in folder.checkpoints.states())
        self.link.sync()
        self._saved_at = self.clock.seconds()
        self._save_seconds = self._saved_at - began
        self.pace.pause(self._save_seconds)

    # -- beginning and end

    def _take_up(self) -> None:
        """Go on from the latest checkpoint, or begin."""
        if self.snapshots.is_dir() and self.link.leads:
            remove_leftovers(self.snapshots)
        checkpoint = self.folder.latest_checkpoint()
        if checkpoint is None:
            self._begin()
        else:
            self._load(checkpoint)
            if not self.state.finished:
                seconds = self.state.seconds
                self.metrics.append({"event": "restart", "update": self.state.update, "seconds": seconds})
                self.log.say(f"going on from update {self.state.update}, epoch {self.state.epochs:.2f}")
        self.link.check_equal(self.live)
        self._start_clock(self.state.seconds)
        if checkpoint is None and self.settings.on_bad_loss == "rollback":
            self._save()  # so that there is something to go back to

    def _begin(self) -> None:
        began_before = any(event["event"] == "start" for event in self.metrics.read())
        self._forget_after(-1)
        n_weights = sum(parameter.numel() for parameter in self.live.values())
        start = {"event": "start", "update": 0, "seconds": 0.0, "parameters": n_weights, "torch": torch.__version__}
        threads = {"threads": torch.get_num_threads(), "processes": self.link.size}
        self.metrics.append({**start, "device": str(self.feeder.device), **threads})
        self.link.begin_stream(self.settings.seed)
        if began_before:
            self.metrics.append({"event": "restart", "update": 0, "seconds": 0.0})
            self.log.say("beginning anew: the run was stopped before its first checkpoint")

    def _start_clock(self, seconds: float) -> None:
        self.clock, self.pace, self._saved_at = self.link.clock(seconds), Pace(seconds), seconds

    def _forget_after(self, update: int) -> None:
        for note in self.metrics.truncate_after(update):
            self.log.warn(note)

    def _load(self, checkpoint: Checkpoint) -> None:
        """Take up a saved state; one that is not of this model, or of no form, is a `RunFolderError`."""
        with of_this_run(checkpoint.path):
            self._put_back(checkpoint)

    def _put_back(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        self.state = TrainingState.of(state["training"])
        self.stopper.load(state["stopper"])
        if "metrics" in state and not self.metrics.begins_with(state["metrics"]):
            self.log.warn(f"{self.metrics.path}: lines were lost or changed; curves of the report may have gaps")
        self._forget_after(self.state.update)
        for event in rollback.missing_events(self.metrics.read(), self.state.rollbacks):
            self.metrics.append(event)
        if self.state.finished:
            return
        tensors = checkpoint.tensors()
        put_back(self.live, part_of(tensors, "model"))
        notes = self.updater.load_state(part_of(tensors, "updater"), state["updater"], self.state.update)
        notes += self.average.load(part_of(tensors, "average"), state["average"])
        self.meter.load(state["meter"])
        self.meter.watch.load(state.get("watch", {}))
        for note in (*checkpoint.notes, *notes):
            self.log.warn(note)

    def _end(self) -> TrainingResult:
        state, best = self.state, self.stopper.best_update
        if self.link.leads:
            shutil.rmtree(self.snapshots, ignore_errors=True)
        if all(event["event"] != "end" for event in self.metrics.read()):
            event = {"event": "end", "update": state.update, "seconds": state.seconds, "minutes": state.seconds / 60}
            self.metrics.append({**event, "reason": state.finished, "epochs": state.epochs, "best_update": best})
        return TrainingResult(state.update, state.epochs, state.seconds, state.finished, best, state.scores)

    def _interrupted(self, asked: StopRequest) -> Interrupted:
        return Interrupted(
            f"{asked.name}: stopped after update {self.state.update}; all is saved in {self.folder.path}; "
            "the same command goes on from there",
            signal=asked.number,
        )

    # -- bad losses

    def _recover(self, error: BadLoss) -> None:
        """Write down what did it, and go back to before it; raises `TrainingError` where that is not to be."""
        settings, states, rollbacks = self.settings, self.folder.checkpoints, self.state.rollbacks
        path = self.link.tell(lambda: str(rollback.note_down(self.folder, error, self._texts)))
        told = f"{rollback.describe(error)}; the sentences are in {path}"
        if settings.on_bad_loss != "rollback":
            raise TrainingError(
                f"{told}; to go back and on past them, give the same command with "
                f"--set training.on_bad_loss=rollback; else {rollback.ADVICE}"
            )
        if len(rollbacks) >= settings.max_rollbacks:
            raise TrainingError(f"{told}; gone back {len(rollbacks)} times already; {rollback.ADVICE}")
        target = self.link.tell(lambda: rollback.target_of(error, states.updates(), settings))
        if target is None:
            raise TrainingError(f"{told}; there is no checkpoint from before them; {rollback.ADVICE}")
        event = rollback.event_of(error, target=target, number=len(rollbacks) + 1)
        skipped, seconds = [*self.state.skipped, *(one.position for one in error.suspects)], self.clock.seconds()
        self.link.tell(lambda: states.forget_after(target))
        self._load(states.load(target))
        self.state.skipped, self.state.rollbacks, self.state.seconds = skipped, [*rollbacks, event], seconds
        self._start_clock(seconds)
        self._save()  # from here on a kill changes nothing: what is passed over is on the disk
        self.metrics.append(event)
        self.log.warn(f"{told}; going back to update {target}, and on without {len(error.suspects)} batches")

    def _texts(self, at: Position) -> list[list[str]]:
        """The sentences of a batch, if the folder has a vocabulary to read them with."""
        known = load_tokenizers(self.folder) if self.folder.has_tokenizers else None
        return [self.feeder.texts(int(i), known) for i in self.feeder.plan(at.epoch)[at.index] if known is not None]
