"""The function `train`, which makes a finished run folder from settings, for every task."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from transduce.bulk.translate import with_back_translations
from transduce.config.recipe import to_toml
from transduce.config.settings import Settings
from transduce.data.preparation import Texts
from transduce.data.reading import Sample
from transduce.data.workers import Workplace
from transduce.decoding.translator import Translator
from transduce.distributed.group import check_devices, join_ranks
from transduce.distributed.launch import this_process
from transduce.doctor.checks import warn_of_data
from transduce.doctor.resources import size, warn_of_resources
from transduce.errors import (
    Interrupted,
    RankExited,
    RankStuck,
    RunFolderError,
    SettingsError,
    TooLong,
    TrainingError,
    TransduceError,
    UserError,
)
from transduce.evaluation.evaluate import in_direction
from transduce.evaluation.report import render_report, write_card, write_report
from transduce.evaluation.wording import wording_of
from transduce.inspection.inspected_models import MOST_TOKENS
from transduce.inspection.inspection import inspect
from transduce.logging import Log, print_error
from transduce.machine import Machine, this_machine
from transduce.metrics_log import MetricsFile, end_of
from transduce.models.registry import build_model, count_parameters
from transduce.process import keep_freed_memory, limit_kernel_cache
from transduce.runs.atomic import write_text
from transduce.runs.folder import RunFolder, has_read_text
from transduce.runs.manifest import check_sealed
from transduce.tasks.base import AnyTask, ToDraw, find_prepared, open_prepared
from transduce.tasks.continuation import More, change_settings, continue_run, stored_settings
from transduce.tasks.finetune import (
    Start,
    build_frozen,
    extend_vocabulary,
    find_start,
    load_start_weights,
    save_start_weights,
)
from transduce.tasks.resolve import check, find_task, name_languages, resolve
from transduce.text.extension import Extended
from transduce.training.averaging import AVERAGES
from transduce.training.loop import Trainer
from transduce.training.ranks import Ranks
from transduce.training.step import Updater

N_DRAWN = 3
"""Number of sentences with attention maps in the report."""


def train(
    settings: Settings | None = None,
    run: Path | str | None = None,
    *,
    src: Path | str | None = None,
    tgt: Path | str | None = None,
    pairs: Iterable[tuple[str, str]] | None = None,
    more: More | None = None,
    log: Log | None = None,
    dry_run: bool = False,
) -> Path:
    """Train a model into the run folder `run`; return its path.

    Defaults for unset settings are chosen and printed. If the folder contains the same run, its training resumes; then
    text and settings may be left out, and settings with the trait `changeable` may have other values. Under torchrun
    the main process calls this function, and the other ranks call `run_worker`.

    >>> train(src="train.en", tgt="train.de", run="runs/mine")                      # doctest: +SKIP
    >>> train(pairs=[("A dog.", "Ein Hund."), ("A cat.", "Eine Katze.")], run="x")  # doctest: +SKIP
    >>> train(run="runs/mine", more=More(updates=1000))                             # doctest: +SKIP

    Args:
        settings: Settings of the run. Defaults for unset settings are chosen, or taken from the run in the folder.
        run: The run folder.
        src: File of source sentences, instead of `settings.data.train`.
        tgt: File of their translations, line by line.
        pairs: Sentence pairs, instead of files. They are written to `run`.jsonl beside the run folder.
        more: The length by which to continue the finished training in the folder.
        log: Log for progress (default: to stderr).
        dry_run: Read the text, print the chosen defaults, and do not train.

    Raises:
        UserError: A mistake that the user can correct, before anything is written.
        Interrupted: Ctrl-C; everything is saved.
        TrainingError: The loss is not finite.
    """
    if run is None:
        raise SettingsError("run: there is no run folder; give run='runs/NAME'")
    log, path = log or Log(), Path(run)
    settings = _with_text(settings or Settings(), path, src, tgt, pairs)
    if more is not None and dry_run:
        raise SettingsError(
            "dry_run: shows the settings of a new training, and more continues one; leave one out", "more"
        )
    if more is not None and not has_read_text(path):
        raise RunFolderError(f"more {more.length}: {path} contains no training that could be continued", "more", "run")
    limit_kernel_cache()
    start = None if has_read_text(path) else find_start(settings)
    task = check(settings if start is None else start.settings)
    machine = this_machine(settings.training.device)
    check_devices(torch.device(machine.device))
    with join_ranks() as ranks:
        machine = machine.shared(ranks.size, ranks.local_size)
        if dry_run:  # temporary files go to the disk of the run
            existing = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
            _resolved(task, settings, start=start, machine=machine, log=log, workplace=Workplace(existing))
        else:
            _train_in(path, settings, task=task, start=start, more=more, machine=machine, log=log, ranks=ranks)
    return path


def _with_text(
    settings: Settings,
    run: Path,
    src: Path | str | None,
    tgt: Path | str | None,
    pairs: Iterable[tuple[str, str]] | None,
) -> Settings:
    """Return the settings with the arguments of `train` as training text; pairs are written to a file first.

    Without these arguments, use the text in the settings or, if they have none, the stored settings of the run.
    """
    if (src is None) != (tgt is None) or (src is not None and pairs is not None):
        raise SettingsError("src, tgt, pairs: give src and tgt, or pairs")
    if src is not None and tgt is not None:
        corpus = {"src": Path(src).absolute(), "tgt": Path(tgt).absolute()}
    elif pairs is not None:
        corpus = {"path": run.absolute().with_name(f"{run.name}.jsonl")}
        lines = (json.dumps({"src": source, "tgt": target}, ensure_ascii=False) for source, target in pairs)
        corpus["path"].parent.mkdir(parents=True, exist_ok=True)
        write_text(corpus["path"], "".join(f"{line}\n" for line in lines))
    elif settings.data.train or settings.data.demo:
        return settings
    elif (run / "recipe.toml").exists():
        return stored_settings(run, settings)
    else:
        raise SettingsError("there is no training text: give src and tgt, pairs, or settings with data.train")
    return settings.with_values("data", train=[corpus])


def prepare(settings: Settings, path: Path, *, log: Log | None = None) -> None:
    """Read and encode the text into the run folder `path`, as `train` does before the first update.

    A killed preparation resumes.
    """
    log = log or Log()
    start = None if has_read_text(path) else find_start(settings)
    task, machine = check(settings if start is None else start.settings), this_machine(settings.training.device)
    with RunFolder.create(path, settings, to_toml(settings)) as folder:
        _prepare(task, folder, asked=settings, start=start, machine=machine, log=log)


def _train_in(
    path: Path,
    settings: Settings,
    *,
    task: AnyTask,
    start: Start | None,
    more: More | None,
    machine: Machine,
    log: Log,
    ranks: Ranks,
) -> None:
    """Lock the run folder, and prepare, train and finish the run in it; only the main process calls this."""
    with RunFolder.create(path, settings, to_toml(settings)) as folder:
        end = _end_of(folder)
        if end is not None and more is not None:
            continue_run(task, folder, more, end, log)
            end = None
        elif more is not None:
            log.say(
                f"{path} is not finished: its training resumes, with its limit; then more {more.length} continue it"
            )
        if folder.requested:
            change_settings(folder, is_finished=end is not None)
        has_prepared = (path / "tokens").exists()
        if end is not None and not has_prepared:
            RunFolder.open(path)  # the error names a missing or damaged file
            log.say(
                f"{path} is finished; its model {wording_of(folder.settings).usage}; --more-updates continues the "
                "training; name another folder to train again"
            )
            return
        if end is None and has_read_text(path) and not has_prepared:
            if (path / "README.md").exists():  # the card is written at the end
                raise RunFolderError(
                    f"{path / 'metrics.jsonl'} is damaged: it records no end of training, but the encoded text was "
                    "removed as after the end; the model can be used; to train, name another run folder",
                    "run",
                )
            raise RunFolderError(
                f"{path / 'tokens'} was removed, but {path / 'metrics.jsonl'} has no end of the training; remove "
                f"{path / 'data.json'} too, and the same command reads the text again and resumes"
            )
        if end is None:
            prepared = _prepare(task, folder, asked=settings, start=start, machine=machine, log=log)
            timeout = folder.settings.training.timeout
            ranks.start({"folder": str(path.absolute()), "device": machine.device, "timeout": timeout})
            best_update = learn(task, folder, prepared, device=machine.device, log=log, ranks=ranks, machine=machine)
        else:
            check_sealed(path / "tokens")
            best_update = end["best_update"]
        is_mean = AVERAGES[folder.settings.training.average].is_mean
        if not best_update and settings.training.start and not is_mean:
            log.warn("no validation was better than the one before the first update: the run keeps the initial weights")
        if settings.training.lora is not None and settings.training.lora.merge:
            folder.merge_adapters()
        save_attention(folder, task.finish(folder, update=best_update, log=log))
        finalize(folder, log)


def _resolved(
    task: AnyTask, asked: Settings, *, start: Start | None, machine: Machine, log: Log, workplace: Workplace
) -> tuple[Texts[Any], Settings, Extended]:
    """Read the text, resolve the settings and make the vocabulary; return text, settings and vocabulary."""
    if start is not None:
        asked = start.settings
        log.say(start.summary)
    if asked.data.monolingual and not workplace.keep:
        log.say("a dry run does not translate data.monolingual: the choices are for the other text alone")
    elif asked.data.monolingual:
        assert workplace.folder is not None
        run = workplace.folder.parent
        asked = with_back_translations(asked, run.with_name(f"{run.name}.back-translated"), log)
    asked = name_languages(asked, task, log)
    texts = task.form.read_texts(asked, log, workplace=workplace)
    extended = None if start is None else extend_vocabulary(start, texts.lines(), log)
    known = None if extended is None else extended.tokenizers
    settings, tokenizers = resolve(task, asked, texts, machine, log, known=known)
    if tokenizers.src.reads_text:
        warn_of_data(Sample(texts.windows), asked.data, task.form.name, log)
    return texts, settings, replace(extended or Extended(tokenizers, (), ()), tokenizers=tokenizers)


def _prepare(
    task: AnyTask,
    folder: RunFolder,
    *,
    asked: Settings,
    start: Start | None,
    machine: Machine,
    log: Log,
) -> Any:
    """Return the encoded text of a run; if it does not exist yet, encode it, and copy the weights to start from.

    If the user made a mistake, a new folder is removed. If the disk is full, the folder stays with the text so far.
    """
    if folder.resumed and (prepared := find_prepared(task, folder, log)) is not None:
        shutil.rmtree(folder.path / "preparation", ignore_errors=True)  # left by a kill
        return prepared
    tokens, workplace = folder.path / "tokens", Workplace(folder.path / "preparation", keep=True)
    shutil.rmtree(tokens, ignore_errors=True)  # left by a killed process
    tokens.mkdir(exist_ok=True)
    (folder.path / "preparation").mkdir(exist_ok=True)
    try:
        texts, settings, extended = _resolved(task, asked, start=start, machine=machine, log=log, workplace=workplace)
        folder.write_settings(settings)
        if start is not None and settings.training.start is not None:
            save_start_weights(start, extended, settings, tokens)
        prepared = task.prepare(folder, texts, extended.tokenizers, log)
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
    """Build the model and train it; return the number of the best update. Every rank calls this.

    `machine`: given in the main process, which warns of too little memory or disk space.
    """
    settings, training, tokenizers = folder.settings, folder.settings.training, prepared.tokenizers
    torch_device = ranks.bind_device(torch.device(device))
    if torch_device.type == "cpu":
        keep_freed_memory()
    torch.manual_seed(training.seed)
    build = build_model if training.lora is None else partial(build_frozen, folder=folder.path / "tokens")
    model = build(settings.model, n_src=tokenizers.n_src, n_tgt=tokenizers.n_tgt)
    log.say(f"model: {count_parameters(model):,} parameters")
    is_new = not folder.checkpoints.updates()
    if training.start is not None and (is_new or training.lora is not None):  # checkpoints have no frozen weights
        load_start_weights(model, folder.path / "tokens", log, lora=training.lora)
    if machine is not None and is_new:
        warn_of_resources(settings, model, folder.path, machine, log)
    feeder = task.batches(prepared, settings, torch_device)
    feeder.rank, feeder.n_ranks = ranks.rank, ranks.size
    validator = task.validate(model, prepared, settings, torch_device)
    loss = task.loss(settings)
    updater = Updater(model, training, device=torch_device, precision=training.precision, criterion=loss, ranks=ranks)
    if updater.kernels != "torch":
        log.say(f"kernels: {updater.kernels} (PyTorch computes what they do not cover)")
    trainer = Trainer(model, folder, updater=updater, feeder=feeder, validator=validator, log=log)
    return trainer.run().best_update


def run_worker() -> int:
    """Train as a rank other than the main process, without writing files or printing progress; return the exit code.

    The main process reports errors that all ranks see. This function reports errors of this rank alone, with the number
    of the process.
    """
    limit_kernel_cache()
    try:
        with join_ranks() as ranks:
            message = ranks.start({})
            if "exit" in message:
                return int(message["exit"])
            folder = RunFolder.open(Path(message["folder"]), model=False)
            task, log = find_task(folder.settings.task), Log(quiet=True, stream=io.StringIO())
            learn(task, folder, open_prepared(task, folder), device=message["device"], log=log, ranks=ranks)
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


def save_attention(folder: RunFolder, sentences: ToDraw) -> None:
    """Save attention weights for the report, for the first N_DRAWN sentences that are short enough for the model."""
    if not sentences:
        return
    translator = Translator.load(folder.path, device=folder.settings.training.device, trainable=True)
    directed = ((in_direction(translator, direction), src) for direction, src in sentences)
    readable = (
        (translator, src)
        for translator, src in directed
        if len(translator.tokenizers.src.encode(src)) <= min(translator.longest, MOST_TOKENS)
    )
    if inspections := [inspect(translator, src) for translator, src in islice(readable, N_DRAWN)]:
        records = [inspection.to_json(views=["sides", "attention", "rules"]) for inspection in inspections]
        folder.write_record("attention.json", {"sentences": [record for record in records if record["attention"]]})


def finalize(folder: RunFolder, log: Log) -> None:
    """Write the report and the model card, store a checksum of metrics.jsonl, and delete the encoded text.

    With `training.keep_checkpoints` = 0, delete the checkpoints too.
    """
    if (folder.path / "metrics.jsonl").exists():
        folder.manifest.add(folder.manifest.records, "metrics.jsonl")
    write_report(folder)
    write_card(folder)
    unused = folder.path / ".tokens.done.aside"  # after a kill, the next start removes the remaining files
    (folder.path / "tokens").rename(unused)  # now the run counts as finished
    shutil.rmtree(unused, ignore_errors=True)
    states = [folder.path / name for name in ("checkpoints", "averaging")]
    if not folder.settings.training.keep_checkpoints:
        for path in states:
            shutil.rmtree(path, ignore_errors=True)
    n_bytes = sum(file.stat().st_size for path in states for file in path.rglob("*") if file.is_file())
    log.say(f"run folder: {folder.path}    report: {folder.path / 'report.html'}")
    if n_bytes:
        log.say(
            f"checkpoints: {size(n_bytes)}; transduce train {folder.path} --more-updates N continues from the last one"
        )
    log.say("next:")
    for command in wording_of(folder.settings).next_commands(folder.path):
        log.say(f"  {command}")


def rebuild_report(run: Path) -> Path:
    """Write the report of a finished or running training again, and the model card if it is missing.

    Return the path of the report.
    """
    if is_finished(run):
        with RunFolder.open_locked(run) as folder:
            write_report(folder)
            if _end_of(folder) is not None and not (run / "README.md").exists():  # an import already has a card
                write_card(folder)
    else:  # a running training holds the lock; at its end it writes the report again
        folder = RunFolder.open(run, model=False)
        write_text(run / "report.html", render_report(folder))
    return run / "report.html"


def is_finished(run: Path) -> bool:
    """Whether the training in a run folder is finished, so that `train` has nothing left to do."""
    return (run / "manifest.json").exists() and not (run / "tokens").exists() and (run / "model.safetensors").exists()


def _end_of(folder: RunFolder) -> Mapping[str, Any] | None:
    """Return the last event of a finished training in metrics.jsonl; None if it is not finished."""
    return end_of(MetricsFile(folder.path / "metrics.jsonl").read(), n_continuations=folder.manifest.n_continuations)
