"""The training loop: update, log, validate, save; it stops at a limit and resumes exactly where it was stopped.

A run that was killed at any moment and started again gives the same losses and the same final weights, bit for bit, as
an uninterrupted run. This holds on a CPU, on the same machine and with the same number of threads. A GPU sums in no
fixed order, so there the results are equal up to rounding. A limit in minutes becomes a limit in updates
(`schedule.TimeLimit`).

The last checkpoint and the best weights so far (`model.safetensors`) are never lost, because both are written under
another name and then renamed.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator

from torch import nn

from transduce.config.section import resolved
from transduce.errors import Interrupted, TooLong, TrainingError
from transduce.logging import Bar, Log
from transduce.metrics_log import MetricsFile, end_of
from transduce.process import handle_signals, release_memory
from transduce.runs.folder import RunFolder
from transduce.text.tokenizer import load_tokenizers
from transduce.training.averaging import borrowed
from transduce.training.feed import Feed, Feeder, ahead
from transduce.training.meter import LOGGED_UPDATES, Row, Stopwatch, peak_memory, summarize
from transduce.training.schedule import SCHEDULES, Limits, Moment, TimeLimit
from transduce.training.session import Session, TrainingState, score_of
from transduce.training.step import DoesNotFit, Updater, UpdateResult
from transduce.training.validate import Validator, format_validation

SAVE_SECONDS = 600.0  # longest time between checkpoints, also if validations are rarer
MOST_SKIPPED = 3  # number of skipped updates in a row after which the run stops
MEASURED_SHARE, MEASURED_UPDATES = 0.2, 10  # minimum share of the time, and updates, before the time limit is fixed

REHEARSALS = 3  # repetitions of an update's passes that measure the cost of `training.consistency`

ADVICE = "resume with a lower training.lr, or start another run with a longer warm-up or training.precision=float32"


class StopRequest:
    """Whether a signal has asked the run to stop, as its truth value; `number` is the signal's number, or 0."""

    def __init__(self) -> None:
        self.number = 0
        self.make_error: Callable[[int], Exception] | None = None

    def __bool__(self) -> bool:
        return self.number != 0

    @contextlib.contextmanager
    def interrupting(self, make_error: Callable[[int], Exception]) -> Iterator[None]:
        """Context manager in which a signal raises the error `make_error(number)` in the main thread.

        An earlier signal raises the error on entry. Use it for work that a resumed run repeats, such as a validation.
        """
        self.make_error = make_error
        try:
            if self:
                raise make_error(self.number)
            yield
        finally:
            self.make_error = None


@contextlib.contextmanager
def stop_on_signals(say: Callable[[str], None]) -> Iterator[StopRequest]:
    """Handle SIGINT, SIGTERM and SIGHUP inside the `with` block: the first sets the yielded request.

    The second ends the process, unless it is SIGHUP, as a closing terminal may send several. `say` prints a line.
    """
    request = StopRequest()

    def ask(number: signal.Signals) -> None:
        if request and number.name == "SIGHUP":
            return
        if request:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        request.number = int(number)
        if request.make_error is not None:
            raise request.make_error(request.number)
        with contextlib.suppress(RuntimeError):  # raised if the signal came while a line was being written
            say(f"{number.name}: finishing the current update and saving; a second signal stops without saving")

    with handle_signals(ask, "SIGHUP", always=("SIGINT", "SIGTERM")):
        yield request


class Trainer:
    """The training loop of a model in its run folder; `run` executes it."""

    def __init__(
        self, model: nn.Module, folder: RunFolder, *, updater: Updater, feeder: Feeder, validator: Validator, log: Log
    ) -> None:
        self.folder, self.log = folder, log
        self.updater, self.feeder, self.validator = updater, feeder, validator
        self.session = Session(model, folder, updater=updater, log=log)
        self.ranks, self.live = self.session.ranks, self.session.live
        self.settings = s = folder.settings.training
        self.schedule = SCHEDULES[resolved(s.schedule, "training.schedule")]
        self.warmup = resolved(s.warmup_updates, "training.warmup_updates")
        self.valid_updates = resolved(s.valid_updates, "training.valid_updates")
        self.limits = Limits.of(s)
        self.stopwatch = Stopwatch(0.0)
        self.stop = StopRequest()  # signals of this process
        self.asked = 0  # the number of the signal that asked any rank to stop, or 0
        self.now = 0.0  # seconds of training over all restarts, equal in all ranks, so that they decide equally
        self._began = self._saved_at = self._save_seconds = 0.0
        self._shown: dict[str, float] = {}  # loss and speed of the last metrics line, for the progress bar

    def run(self) -> TrainingState:
        """Train from the latest checkpoint, or from the start, until a limit of the settings; return the final state.

        `model.safetensors` then contains the weights that `training.average` selects. Raises `Interrupted` after
        SIGINT, SIGTERM or SIGHUP (everything is saved); `TrainingError` after three updates in a row whose loss or
        gradient is not finite, or if a single sentence does not fit into memory; `RunFolderError` if the disk fails.
        """
        with stop_on_signals(self.log.say) as self.stop, self.session.writer:
            self._start_or_resume()
            if not self.session.state.finished:
                with self.log.progress("training") as bar:
                    self._run_until_finished(bar)
            self._finish()
            self._agree()
            if self.asked:  # the next start completes the run
                raise self._interrupted(self.asked)
            return self.session.state

    def _run_until_finished(self, bar: Bar) -> None:
        state = self.session.state
        if state.validated != state.update and self._is_validation_due():
            self._validate(bar)  # before the first update of a fine-tuning, or after an interrupted validation
        with ahead(self.feeder.feeds(state.position), n=2 if self.feeder.device.type == "cuda" else 0) as feeds:
            while not (reason := self._reason_to_end()):
                self.ranks.report_activity(f"update {state.update + 1}")
                self._update(feed := next(feeds))
                self._show(bar, f"update {state.update}")
                if self._is_validation_due() and not self.asked:
                    self._validate(bar)
                elif self.asked or self._is_time_to_save():
                    self._save()
                self._set_time_limit(feed)
                if self.asked:
                    if self.session.saved_update != state.update:  # a signal came while the time limit was set
                        self._save()
                    self.session.writer.wait()
                    raise self._interrupted(self.asked)
        if state.validated != state.update:
            self._validate(bar, finished=reason)
        else:
            state.finished = reason
            self._save()
        self.session.writer.wait()

    def _is_validation_due(self) -> bool:
        update = self.session.state.update
        return update % self.valid_updates == 0 if update else self.settings.start is not None

    def _is_time_to_save(self) -> bool:
        every = self.settings.save_updates
        is_due = every is not None and self.session.state.update % every == 0
        return is_due or self.now - self._saved_at > SAVE_SECONDS

    def _agree(self) -> None:
        """Agree with all ranks on the time and on whether to stop."""
        self.asked, self.now = self.session.writer.agree(self.stop.number, time.monotonic() - self._began)

    # -- updates

    def _update(self, feed: Feed) -> None:
        session, state = self.session, self.session.state
        state.factor = self.schedule(Moment(state.update, state.progress, state.since or self.warmup))
        carry = () if feed.position.index == 0 else session.carry
        with self._reporting_memory():
            result = self.updater.update(
                feed.batches,
                state.factor,
                n_targets=feed.n_targets,
                carry=carry,
                dummies=feed.dummies,
                progress=state.progress,
            )
        session.carry = result.carry
        state.update, state.position, state.epochs = state.update + 1, feed.after, feed.epochs
        self._agree()
        self.stopwatch.count(self.now, feed.n_targets)
        if result.skipped:
            state.skipped += 1
            self._report_skipped(feed, result)
        else:
            state.skipped = 0
            session.average.after_update()
            # the last group: embeddings and norms, if matrices have another learning rate
            lr = self.updater.optimizer.param_groups[-1]["lr"]
            sums = (result.loss_sum, result.nll_sum, result.grad_norm)
            state.rows.append(Row(state.update, lr, feed.n_targets, feed.n_tokens, feed.n_slots, *sums))
        if state.update % LOGGED_UPDATES == 0 and state.rows:
            self._write_metrics()
        if state.skipped >= MOST_SKIPPED:
            self._save()
            session.writer.wait()
            raise TrainingError(
                f"the loss or its gradient was not finite in {state.skipped} updates in a row, the last of them update "
                f"{state.update}; everything before is saved; {ADVICE}"
            )

    def _report_skipped(self, feed: Feed, result: UpdateResult) -> None:
        update, path = self.session.state.update, self.folder.path / "skipped.jsonl"
        numbers = {"loss": result.loss_sum / max(1, feed.n_targets), "grad_norm": result.grad_norm}
        self.session.metrics.append({"event": "skipped", "update": update, "seconds": self.now, **numbers})
        tokenizers = load_tokenizers(self.folder)
        texts = [self.feeder.texts(int(i), tokenizers, epoch=feed.position.epoch) for i in feed.indices]
        MetricsFile(path, active=self.ranks.is_main_process).append({"update": update, "sentences": texts})
        shown = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        self.log.warn(
            f"update {update}: the loss or its gradient is not finite ({shown}); the update was skipped; its sentences "
            f"are the last line of {path}"
        )

    @contextlib.contextmanager
    def _reporting_memory(self) -> Iterator[None]:
        """Context manager for an update: report each smaller `too_large`, and turn `DoesNotFit` into `TooLong`."""
        updater, limit, update = self.updater, self.updater.too_large, self.session.state.update + 1
        try:
            yield
        except DoesNotFit as error:
            if self.ranks.in_step:
                raise TooLong(
                    f"update {update}: out of memory for a batch {error}; with training.parallel = 'shard' one process "
                    "cannot split its batch alone; the last checkpoint is kept; resume with a smaller "
                    "training.micro_batch_tokens"
                ) from None
            text = load_tokenizers(self.folder).src.decode(error.batch.inputs[0][0].tolist())
            if is_only := self.ranks.size == 1:  # other ranks would not take part in saving
                self._save()
            kept = "everything before is saved" if is_only else "the last checkpoint is kept"
            raise TooLong(
                f"update {update}: out of memory even for a single sentence {error}: "
                f"{' '.join(text.split())[:200]!r}; {kept}; start another run with a smaller data.max_length or a "
                "smaller model"
            ) from None
        finally:
            if updater.too_large is not None and updater.too_large != limit:
                event = {"event": "memory", "update": update, "too_large": updater.too_large}
                self.session.metrics.append(event)
                self.log.warn(
                    f"update {update}: out of memory; from now on, batches of at least {updater.too_large:,} slots "
                    "(padded tokens of both sides) are split, with the same gradient up to rounding; to avoid this, "
                    "set training.micro_batch_tokens"
                )

    def _write_metrics(self) -> None:
        state, speed = self.session.state, self.stopwatch.targets_per_second(self.now)
        line, state.rows = summarize(state.rows), []
        event = {"event": "update", "seconds": self.now, "epoch": state.epochs, "tokens_per_second": speed, **line}
        self.session.metrics.append(event)
        self._shown = {"loss": line["loss"], "tokens_per_second": speed}

    # -- limits

    def _reason_to_end(self) -> str:
        """Update the progress; return the reason why training ends now, or an empty string if it continues."""
        state, limits, timed = self.session.state, self.limits, self.session.time_limit
        n_timed = timed.updates if timed is not None and state.update >= timed.since else None
        used = limits.progress(updates=state.update, epochs=state.epochs, timed_updates=n_timed)
        state.progress = max(state.progress, used)
        if 0 < self.settings.patience <= state.since_best:
            by = self.settings.stop_by if self.settings.stop_by in state.scores else "loss"
            return f"no better {by} in {self.settings.patience} validations"
        if limits.is_late(self.now, began=state.began, reserve=state.reserve):
            planned = f" of {n_timed:,} planned" if n_timed else ""
            self.log.warn(
                f"training.max_minutes = {self.settings.max_minutes:g}: the time is over after update {state.update:,}"
                f"{planned}: the machine became slower; the schedule did not reach its end"
            )
            return "max_minutes (by the clock)"
        if state.progress < 1.0:
            return ""
        if limits.updates is not None and state.update >= limits.updates:
            return "max_updates"
        return "max_epochs" if limits.epochs is not None and state.epochs >= limits.epochs else "max_minutes"

    def _show(self, bar: Bar, note: str) -> None:
        """Update the progress bar; with a time limit, the clock decides until the number of updates is known."""
        share, seconds = self.session.state.progress, self.limits.seconds
        if seconds is None:
            bar.update(share, **self._shown, note=note)
            return
        if self.session.time_limit is None:
            share = max(share, min(1.0, self.now / seconds))
        bar.update(share, **self._shown, note=note, at_most=seconds - self.now)

    def _set_time_limit(self, feed: Feed) -> None:
        """After a fifth of the time, store the number of updates that fit into the time limit as the new limit."""
        state, seconds, now = self.session.state, self.limits.seconds, self.now
        n = self.stopwatch.n_updates
        if seconds is None or self.session.time_limit is not None or not n:
            return
        share = (now - state.began) / max(seconds - state.began, 1e-9)
        if not (n >= MEASURED_UPDATES and share > MEASURED_SHARE) and share < 0.5:
            return
        per_update = self.stopwatch.seconds_per_update(now)
        # measure the time of a validation, which does not change the run
        if state.validated <= 0 and not state.reserve:
            self.validator(self.ranks)
            self._agree()
            state.reserve = self.now - now
        begin = 1.0 if self.settings.consistency is None else self.settings.consistency.begin
        extra_seconds = self._extra_seconds(feed) if state.progress < begin < 1.0 else 0.0
        time_limit = TimeLimit.derive(
            done=state.update,
            seconds_left=seconds - self.now,
            seconds_per_update=per_update,
            validation_seconds=state.reserve,
            valid_updates=self.valid_updates,
            extra_seconds=extra_seconds,
            extra_from=begin,
        )
        self.ranks.broadcast(lambda: time_limit.write(self.folder))
        self.session.time_limit = time_limit
        self.log.say(
            f"{self.settings.max_minutes:g} minutes are {time_limit.updates:,} updates at {per_update:.3g} s each; "
            "training ends there, so that a resumed run gives the same model"
        )

    def _extra_seconds(self, feed: Feed) -> float:
        """Measure, without changing weights, how many seconds longer an update takes with `training.consistency`."""
        ends = [self.now]
        for progress in (self.session.state.progress, 1.0):
            with self._reporting_memory():
                for _ in range(REHEARSALS):
                    self.updater.update(feed.batches, 0.0, dummies=feed.dummies, progress=progress, steps=False)
            self._agree()
            ends.append(self.now)
        return max(0.0, ends[2] - 2 * ends[1] + ends[0]) / REHEARSALS

    # -- validation and saving

    def _validate(self, bar: Bar, *, finished: str = "") -> None:
        """Save, score the candidate weights, write the model if `training.average` changes it, and save again.

        A signal interrupts the validation. The checkpoint before it is complete by the end of the process, and a
        resumed run validates first. `finished`: the reason why training ends after this validation, if it does.
        """
        session, state = self.session, self.session.state
        if session.saved_update != state.update and state.update:
            self._save()
        if self.ranks.in_step or session.average.is_mean:
            # the validation needs all ranks or removes snapshots to which no checkpoint refers yet
            session.writer.wait()
        began = self.now
        self._show(bar, "validating")
        self.ranks.report_activity(f"validating after update {state.update}")
        average = session.average
        candidate = average.candidate(state.update) if state.update else self.live
        with self.stop.interrupting(self._interrupted), borrowed(self.live, candidate):
            scores = self.validator(self.ranks)
        if not math.isfinite(scores["loss"]):
            raise TrainingError(f"the validation loss after update {state.update} is not finite; {ADVICE}")
        better = state.see(scores, self.settings.stop_by)
        session.writer.wait()  # the model must not belong to an update that no checkpoint contains
        chosen = average.chosen(state.update, candidate, score_of(scores, self.settings.stop_by), is_best=better)
        if chosen is not None:
            session.save_model(chosen)
        self._agree()
        seconds = self.now - began
        event = {"event": "validation", "update": state.update, "seconds": self.now, "epoch": state.epochs}
        session.metrics.append({**event, **scores, "validation_seconds": seconds, "best": better})
        self.log.say(format_validation(state.update, state.epochs, scores, better=better))
        state.validated, state.scores, state.finished = state.update, scores, finished
        state.reserve = seconds + max(self._save_seconds, self.ranks.broadcast(lambda: session.save_seconds))
        self.stopwatch.pause(seconds)
        self._save()
        release_memory()

    def _save(self) -> None:
        began = self.now
        self.ranks.report_activity(f"saving update {self.session.state.update}")
        self.session.save(began)
        self._agree()
        self._saved_at, self._save_seconds = self.now, self.now - began
        self.stopwatch.pause(self._save_seconds)

    # -- start and end

    def _start_or_resume(self) -> None:
        session = self.session
        session.start_or_resume()
        self.ranks.check_equal(self.live)
        if "training.batch_tokens" in session.changed and session.state.position.index:
            session.state.position = self.feeder.position_after(session.state.epochs)
            session.carry = ()
            self.log.say("the rest of this epoch has other batches: some text is read twice in it, or not at all")
        self.now = self._saved_at = session.state.seconds
        self._began, self.stopwatch = time.monotonic() - self.now, Stopwatch(self.now)

    def _finish(self) -> None:
        session, state, n = self.session, self.session.state, self.folder.manifest.n_continuations
        if end_of(session.metrics.read(), n_continuations=n) is None:
            event = {"event": "end", "update": state.update, "seconds": state.seconds, "minutes": state.seconds / 60}
            ends = {"reason": state.finished, "epochs": state.epochs, "best_update": state.best_update}
            memory = peak_memory(self.feeder.device)
            session.metrics.append({**event, **ends, "memory": memory, "continuations": n})

    def _interrupted(self, number: int) -> Interrupted:
        return Interrupted(
            f"{signal.Signals(number).name}: stopped after update {self.session.state.update}; everything is saved in "
            f"{self.folder.path}; run the same command again to resume",
            signal=number,
        )
