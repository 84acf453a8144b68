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
from functools import partial

import torch
from torch import Tensor, nn

from transduce.checkpoint import Checkpoint, RunFolder
from transduce.errors import Interrupted, RunFolderError, TrainingError
from transduce.files import expecting, remove_leftovers, write_json
from transduce.log import Bar, Log, MetricsFile, NoMetrics
from transduce.training.averaging import AVERAGES, borrowed
from transduce.training.distributed import Link
from transduce.training.feed import Feed, Feeder, ahead
from transduce.training.meter import Meter, NotFinite, Pace, Row
from transduce.training.schedule import Clock, Limits, Moment, find_schedule
from transduce.training.state import TrainingResult, TrainingState, checked, full_weights, joined, part_of
from transduce.training.step import Updater, give_back_memory
from transduce.training.stopping import Stopper, StopRequest, score_of, stop_on_signals
from transduce.training.validate import Validator

LOG_UPDATES = 10  # updates a line of metrics.jsonl; between two lines nothing is read from the device
SHOWN_SCORES = {
    "bleu": "BLEU {:.1f}",
    "chrf": "chrF {:.1f}",
    "bits_per_byte": "{:.3f} bits a byte",
    "accuracy": "accuracy {:.1%}",
    "macro_f1": "macro F1 {:.1%}",
    "masked_accuracy": "masked tokens told {:.1%}",
    "next_sentence_accuracy": "next sentences told {:.1%}",
}
SAVE_SECONDS = 600.0  # a checkpoint at least this often, however far validations lie apart


def train(
    model: nn.Module,
    folder: RunFolder,
    *,
    updater: Updater,
    feeder: Feeder,
    validator: Validator,
    log: Log,
    log_updates: int = LOG_UPDATES,
) -> TrainingResult:
    """Train `model` in `folder` from its latest checkpoint, or from the start, to the end that its settings ask for.

    At the end `model.safetensors` holds the weights that `training.average` asks for. Raises `Interrupted` after
    SIGINT, SIGTERM or SIGHUP (everything is saved), `TrainingError` when a loss is not finite, `RunFolderError` when
    the disk fails.
    """
    trainer = Trainer(model, folder, updater=updater, feeder=feeder, validator=validator, log=log)
    trainer.log_updates = log_updates
    return trainer.run()


class Trainer:
    """The loop and its state; `train` is how to use it."""

    log_updates = LOG_UPDATES

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
        self.state, self.meter, self.clock, self.pace = TrainingState(), Meter(), Clock(), Pace(0.0)
        self._saved_at = self._save_seconds = 0.0
        self._shown: dict[str, float] = {}  # loss and speed of the last line, for the bar

    def run(self) -> TrainingResult:
        """Train to the end."""
        with stop_on_signals(self.log.say) as own:
            asked = self.link.shared(own)
            self._take_up()
            if not self.state.finished:
                try:
                    with self.log.progress("training") as bar:
                        self._updates(bar, asked)
                except NotFinite as error:
                    raise TrainingError(self.link.tell(partial(self._explained, error))) from None
            result = self._end()
            if asked:  # during the last validation: what follows training can wait for the same command
                raise self._interrupted(asked.name)
            return result

    # -- the way through the updates

    def _updates(self, bar: Bar, asked: StopRequest) -> None:
        state = self.state
        self.model.train()
        if self.settings.start is not None and state.validated < 0:
            self._validate(bar)  # what it begins with: whether training makes it better shows from there
            self.model.train()
        with ahead(self.feeder.feeds(state.position), n=2 if self.feeder.device.type == "cuda" else 0) as feeds:
            while not (reason := self._reason_to_end()):
                self._update(next(feeds))
                bar.update(state.progress, **self._shown, note=f"update {state.update}")
                if state.update % self.valid_updates == 0:
                    self._validate(bar)
                elif asked or self.clock.seconds() - self._saved_at > SAVE_SECONDS:
                    self._save()
                if asked:
                    raise self._interrupted(asked.name)
        if state.validated != state.update:
            self._validate(bar, finished=reason)
        else:
            state.finished = reason
            self._save()

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
        result = self.updater.update(feed.batches, factor, feed.n_targets)
        self.average.after_update()
        state.update, state.position, state.epochs = state.update + 1, feed.after, feed.epochs
        lr = self.updater.optimizer.param_groups[-1]["lr"]  # of embeddings and norms where matrices have their own
        row = Row(state.update, lr, feed.n_targets, feed.n_tokens, feed.n_slots)
        self.meter.add(row, (result.loss_sum, result.nll_sum, result.grad_norm), feed.indices)
        self.pace.add(feed.n_targets)
        if state.update % self.log_updates == 0:
            self._write_line()

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
            raise TrainingError(f"the validation loss after update {state.update} is not finite; {self._advice()}")
        better = self.stopper.see(state.update, scores)
        score = score_of(scores, self.settings.stop_by)[0]
        kept = self.average.keep(state.update, score, better=better) if state.update else self.live
        if kept is not None:
            self.folder.save_model(full_weights(self.model, kept))
        seconds = self.clock.seconds() - began
        event = {"event": "validation", "update": state.update, "seconds": self.clock.seconds(), "epoch": state.epochs}
        self.metrics.append({**event, **scores, "validation_seconds": seconds, "best": better})
        self._say(scores, better=better)
        state.validated, state.scores, state.finished = state.update, scores, finished
        state.reserve = seconds + self._save_seconds
        self.pace.pause(seconds)
        self._save()
        give_back_memory()

    def _say(self, scores: dict[str, float], *, better: bool) -> None:
        state = self.state
        texts = [f"update {state.update}", f"epoch {state.epochs:.1f}", f"validation loss {scores['loss']:.3f}"]
        texts += [form.format(scores[name]) for name, form in SHOWN_SCORES.items() if name in scores]
        self.log.say("  ".join(texts) + ("  (best)" if better else ""))

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
        }
        self.folder.save_checkpoint(self.state.update, joined(parts), state)
        self.folder.prune(self.settings.keep_checkpoints)
        self.average.saved()
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
            self._forget_after(-1)
            n_weights = sum(parameter.numel() for parameter in self.live.values())
            start = {"event": "start", "update": 0, "seconds": 0.0, "parameters": n_weights, "torch": torch.__version__}
            threads = {"threads": torch.get_num_threads(), "processes": self.link.size}
            self.metrics.append({**start, "device": str(self.feeder.device), **threads})
            self.link.begin_stream(self.settings.seed)
        else:
            self._load(checkpoint)
            if not self.state.finished:
                seconds = self.state.seconds
                self.metrics.append({"event": "restart", "update": self.state.update, "seconds": seconds})
                self.log.say(f"going on from update {self.state.update}, epoch {self.state.epochs:.2f}")
        self.link.check_equal(self.live)
        self.clock = self.link.clock(self.state.seconds)
        self.pace, self._saved_at = Pace(self.state.seconds), self.state.seconds

    def _forget_after(self, update: int) -> None:
        for note in self.metrics.truncate_after(update):
            self.log.warn(note)

    def _load(self, checkpoint: Checkpoint) -> None:
        """Take up a saved state; one that is not of this model, or of no form, is a `RunFolderError`."""
        try:
            with expecting(checkpoint.path):
                self._put_back(checkpoint)
        except RuntimeError as error:  # PyTorch's, of shapes and types that do not fit
            told = " ".join(str(error).split())[:100]
            raise RunFolderError(f"{checkpoint.path} is damaged: its tensors are not of this run ({told})") from error

    def _put_back(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        self.state = TrainingState.of(state["training"])
        self.stopper.load(state["stopper"])
        self._forget_after(self.state.update)
        if self.state.finished:
            return
        tensors = checkpoint.tensors()
        with torch.no_grad():
            values = part_of(tensors, "model")
            for name, live in self.live.items():
                live.copy_(checked(values[name], like=live, name=name))
        notes = self.updater.load_state(part_of(tensors, "updater"), state["updater"], self.state.update)
        notes += self.average.load(part_of(tensors, "average"), state["average"])
        self.meter.load(state["meter"])
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

    def _interrupted(self, signal_name: str) -> Interrupted:
        return Interrupted(
            f"{signal_name}: stopped after update {self.state.update}; all is saved in {self.folder.path}; "
            "the same command goes on from there"
        )

    def _explained(self, error: NotFinite) -> str:
        """What the user is told, and the sentences of the bad update in a file."""
        row, path = error.row, self.folder.path / "not_finite.json"
        sentences = [{"index": i, "text": self._text(i)} for i in error.indices]
        numbers = {"loss": repr(row.loss_sum / row.n_targets), "grad_norm": repr(row.grad_norm)}
        write_json(path, {"update": row.update, **numbers, "lr": row.lr, "sentences": sentences})
        return (
            f"update {row.update} is not finite (loss {numbers['loss']}, gradient norm {numbers['grad_norm']}); "
            f"its {len(sentences)} sentences are in {path}; {self._advice()}"
        )

    def _text(self, index: int) -> list[str]:
        """A training example, if the folder has a vocabulary to read it with."""
        return self.feeder.texts(index, self.folder.tokenizers()) if self.folder.has_tokenizers else []

    def _advice(self) -> str:
        return "start another run with a lower training.lr, a longer warm-up, or training.precision=float32"
