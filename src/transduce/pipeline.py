"""`train`: from settings to a finished run folder, for every task."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import torch

from transduce.config.recipe import to_toml
from transduce.config.settings import Settings
from transduce.data.check_sample import Sample
from transduce.data.workers import Workers, Workplace
from transduce.distributed.environment import this_process
from transduce.distributed.group import check_devices, join_ranks
from transduce.doctor.checks import warn_of_data
from transduce.doctor.resources import warn_of_resources
from transduce.errors import (
    Interrupted,
    RankExited,
    RankStuck,
    RunFolderError,
    TooLong,
    TrainingError,
    TransduceError,
    UserError,
)
from transduce.evaluation.card import write_card
from transduce.evaluation.report import render_report, write_report
from transduce.logging import Log, print_error
from transduce.machine import Machine, this_machine
from transduce.metrics_log import MetricsFile
from transduce.models.registry import build_model, count_parameters
from transduce.process import keep_freed_memory, limit_kernel_cache
from transduce.runs.atomic import write_text
from transduce.runs.folder import RunFolder, has_read_text
from transduce.runs.manifest import check_sealed
from transduce.tasks.finetune import Start, extend_vocabulary, find_start, load_start_weights, save_start_weights
from transduce.tasks.registry import AnyTask, find_task
from transduce.tasks.resolve import check, resolve
from transduce.text.extension import Extended
from transduce.training.averaging import AVERAGES
from transduce.training.loop import Trainer
from transduce.training.ranks import Ranks
from transduce.training.step import Updater


def train(settings: Settings, path: Path | str, *, log: Log | None = None, dry_run: bool = False) -> Path:
    """Train a model on the text that the settings name, into the run folder `path`; returns the path.

    Unset settings are chosen and printed. A folder that contains the same run is resumed. `dry_run` reads the text and
    prints the choices, and writes nothing. Under torchrun the main process calls this, workers `run_worker`.

    Raises `UserError` for a mistake that the user can correct, before anything is written; `Interrupted` after Ctrl-C,
    when everything is saved; `TrainingError` when the loss is not finite.
    """
    log, path = log or Log(), Path(path)
    limit_kernel_cache()
    start = None if has_read_text(path) else find_start(settings)
    task = check(settings if start is None else start.settings)
    machine = this_machine(settings.training.device)
    check_devices(torch.device(machine.device))
    with join_ranks() as ranks:
        machine = machine.shared(ranks.size, ranks.local_size)
        if dry_run:
            _resolved(task, settings, start=start, machine=machine, log=log, place=Workplace(_nearest_folder(path)))
        else:
            _train_in(path, settings, task=task, start=start, machine=machine, log=log, ranks=ranks)
    return path


def prepare(settings: Settings, path: Path, *, log: Log | None = None, workers: Workers | None = None) -> None:
    """Read and encode the text into the run folder `path`, as `train` does before the first update.

    A killed preparation resumes. `workers`: what cleans and encodes sentence pairs (default: processes of this
    machine, as many as `data.workers`).
    """
    log = log or Log()
    start = None if has_read_text(path) else find_start(settings)
    task, machine = check(settings if start is None else start.settings), this_machine(settings.training.device)
    with RunFolder.create(path, settings, to_toml(settings)) as folder:
        _prepare(task, folder, asked=settings, start=start, machine=machine, log=log, workers=workers)


def _train_in(
    path: Path, settings: Settings, *, task: AnyTask, start: Start | None, machine: Machine, log: Log, ranks: Ranks
) -> None:
    """Train in the locked run folder, in the main process."""
    with RunFolder.create(path, settings, to_toml(settings)) as folder:
        end = _end_of(folder)
        has_prepared = (path / "tokens").exists()
        if end is not None and not has_prepared:
            wording = task.wording.of(folder.settings)
            RunFolder.open(path)  # names a file that is missing or damaged
            log.say(f"{path} is finished; its model {wording.usage}; name another folder to train again")
            return
        if end is None and has_read_text(path) and not has_prepared:
            raise RunFolderError(
                f"{path / 'metrics.jsonl'} is damaged: it records no end of training, but the encoded text was removed "
                "as after the end; the model can be used; to train, name another run folder"
            )
        if end is None:
            prepared = _prepare(task, folder, asked=settings, start=start, machine=machine, log=log)
            timeout = folder.settings.training.timeout
            ranks.start({"folder": str(path.absolute()), "device": machine.device, "timeout": timeout})
            best_update = learn(task, folder, prepared, device=machine.device, log=log, ranks=ranks, machine=machine)
        else:
            check_sealed(path / "tokens")
            best_update = end["best_update"]
        keeps_best = not AVERAGES[folder.settings.training.average].keeps_last
        if not best_update and settings.training.start and keeps_best:
            log.warn("no validation was better than the one before the first update: the run keeps the initial weights")
        task.finish(folder, update=best_update, log=log)
        finalize(folder, task, log)


def _resolved(
    task: AnyTask, asked: Settings, *, start: Start | None, machine: Machine, log: Log, place: Workplace
) -> tuple[Any, Settings, Extended]:
    """The text, the resolved settings, and the vocabulary."""
    if start is not None:
        asked = start.settings
        log.say(start.summary)
    texts = task.read(asked, log, place=place)
    if not asked.model.reads_vectors:
        warn_of_data(Sample(texts.windows), asked.data, task.reads, log)
    extended = None if start is None else extend_vocabulary(start, *task.lines(texts), log)
    known = None if extended is None else extended.tokenizers
    settings, tokenizers = resolve(task, asked, texts, machine, log, known=known)
    return texts, settings, extended or Extended(tokenizers, (), ())


def _prepare(
    task: AnyTask,
    folder: RunFolder,
    *,
    asked: Settings,
    start: Start | None,
    machine: Machine,
    log: Log,
    workers: Workers | None = None,
) -> Any:
    """Encode the text, and copy the weights to start from, into the folder, unless an earlier start has done it.

    A user's mistake leaves no new folder. After a full disk the folder stays, with what is prepared.
    """
    if folder.resumed and (found := task.find_prepared(folder, log)) is not None:
        shutil.rmtree(folder.path / "preparation", ignore_errors=True)  # left by a kill
        return found
    tokens, place = folder.path / "tokens", Workplace(folder.path / "preparation", keep=True, workers=workers)
    shutil.rmtree(tokens, ignore_errors=True)  # what a killed process has left
    tokens.mkdir(exist_ok=True)
    (folder.path / "preparation").mkdir(exist_ok=True)
    try:
        texts, settings, extended = _resolved(task, asked, start=start, machine=machine, log=log, place=place)
        folder.write_settings(settings)
        if start is not None and settings.training.start is not None:
            save_start_weights(start, extended, settings, tokens)
        prepared = task.encode(folder, texts, extended.tokenizers, settings, log)
        shutil.rmtree(folder.path / "preparation", ignore_errors=True)
        return prepared
    except UserError as error:
        if not folder.resumed and not isinstance(error, RunFolderError):
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def learn(
    task: AnyTask,
    folder: RunFolder,
    prepared: Any,
    *,
    device: str,
    log: Log,
    ranks: Ranks,
    machine: Machine | None = None,
) -> int:
    """Build the model and train it, in every rank; returns the best update.

    `machine`: the main process warns if it has too little memory or disk space.
    """
    settings, training, tokenizers = folder.settings, folder.settings.training, prepared.tokenizers
    where = ranks.bind_device(torch.device(device))
    if where.type == "cpu":
        keep_freed_memory()
    torch.manual_seed(training.seed)
    model = build_model(settings.model, n_src=tokenizers.n_src, n_tgt=tokenizers.n_tgt)
    log.say(f"model: {count_parameters(model):,} parameters")
    if not folder.checkpoints.updates():
        if machine is not None:
            warn_of_resources(settings, model, folder.path, machine, log)
        if training.start is not None:
            load_start_weights(model, folder.path / "tokens", log)
    feeder = task.feeder(prepared, settings, where)
    feeder.rank, feeder.n_ranks = ranks.rank, ranks.size
    feeder.plans = folder.path / "tokens" / "plans" if ranks.size > 1 else None
    validator = task.validator(model, prepared, settings, where)
    criterion = task.criterion(settings)
    updater = Updater(model, training, device=where, precision=training.precision, criterion=criterion, ranks=ranks)
    if updater.kernels != "torch":
        log.say(f"kernels: {updater.kernels} (PyTorch computes what they do not cover)")
    trainer = Trainer(model, folder, updater=updater, feeder=feeder, validator=validator, log=log)
    return trainer.run().best_update


def run_worker() -> int:
    """Wait for the main process and train with it, without I/O and logging; return the exit code.

    Errors that all ranks see are reported by the main process, others here, with the number of this process.
    """
    limit_kernel_cache()
    try:
        with join_ranks() as ranks:
            message = ranks.start({})
            if "exit" in message:
                return int(message["exit"])
            folder = RunFolder.open(Path(message["folder"]), model=False)
            task, log = find_task(folder.settings.task), Log(quiet=True, stream=io.StringIO())
            learn(task, folder, task.open_prepared(folder), device=message["device"], log=log, ranks=ranks)
            return 0
    except RankExited as error:
        if isinstance(error, RankStuck):
            print_error(str(error))
        return error.exit_code
    except TransduceError as error:
        if isinstance(error, Interrupted | TrainingError) and not isinstance(error, TooLong):
            return error.exit_code
        process = this_process()
        print_error(f"process {process.rank + 1} of {process.size}: {error}")
        return error.exit_code


def finalize(folder: RunFolder, task: AnyTask, log: Log) -> None:
    """Write the report and the model card, seal the log with a checksum and delete the encoded text."""
    if (folder.path / "metrics.jsonl").exists():
        folder.manifest.add(folder.manifest.records, "metrics.jsonl")
    write_report(folder, task.wording)
    write_card(folder, task.wording)
    unused = folder.path / ".tokens.done.aside"  # after a kill, the next start removes the rest
    (folder.path / "tokens").rename(unused)  # from here on the run is finished
    shutil.rmtree(unused, ignore_errors=True)
    log.say(f"run folder: {folder.path}    report: {folder.path / 'report.html'}")


def rebuild_report(run: Path) -> Path:
    """Write the report of a finished or running training again, and a missing card; returns the report's path."""
    if is_finished(run):
        with RunFolder.open_locked(run) as folder:
            wording = find_task(folder.settings.task).wording
            write_report(folder, wording)
            if _end_of(folder) is not None and not (run / "README.md").exists():  # an import already has a card
                write_card(folder, wording)
    else:  # the training holds the lock; at its end it writes the report again
        folder = RunFolder.open(run, model=False)
        write_text(run / "report.html", render_report(folder, find_task(folder.settings.task).wording))
    return run / "report.html"


def is_finished(run: Path) -> bool:
    """Whether `train` has nothing left to do in a folder."""
    return (run / "manifest.json").exists() and not (run / "tokens").exists() and (run / "model.safetensors").exists()


def _end_of(folder: RunFolder) -> dict[str, Any] | None:
    """The event of a finished training; None before."""
    events = MetricsFile(folder.path / "metrics.jsonl").read()
    return next((event for event in events if event["event"] == "end" and type(event.get("best_update")) is int), None)


def _nearest_folder(path: Path) -> Path:
    """The folder itself, or the first one above it that exists: on the same disk."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
