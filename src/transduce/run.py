"""Composition: settings become objects, and the objects train. What a finished model does is in `use.py`."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from transduce.checkpoint import RunFolder
from transduce.choose import BEFORE_TEXT, BEFORE_TRAINING, Facts, choose, table
from transduce.config import Settings
from transduce.data.batch import Batch, collate
from transduce.data.batching import padding_share, plan
from transduce.data.objectives import Example
from transduce.data.store import TokenStore
from transduce.decoding.pipeline import Translator
from transduce.errors import SettingsError, UserError, nearest
from transduce.evaluation.metrics import evaluate, metrics
from transduce.files import read_json, write_json
from transduce.finish import finish, renew
from transduce.log import Log, MetricsFile
from transduce.machine import Machine, this_machine
from transduce.models.build import build_model, check_model, count_parameters, resolve_preset
from transduce.prepare import (
    Prepared,
    Texts,
    count_tokens,
    encode,
    find_prepared,
    has_prepared,
    learn_vocabulary,
    read_judged,
    read_texts,
)
from transduce.request import to_toml
from transduce.text.tokenizer import Tokenizers
from transduce.training import loop
from transduce.training.feed import Feeder, SubwordSampling
from transduce.training.optim import OPTIMIZERS
from transduce.training.schedule import find_schedule
from transduce.training.state import TrainingResult
from transduce.training.step import Updater, keep_freed_memory
from transduce.training.validate import Judge, Validator


def train(settings: Settings, path: Path | str, *, log: Log | None = None, dry_run: bool = False) -> Path:
    """Train a translator into the run folder `path`, from the text that the settings name; the folder's path.

    What the settings leave open is chosen and told. A folder that holds the same run goes on where it was. `dry_run`
    reads, chooses, tells and makes nothing. Raises `UserError` for what the user can mend, before anything is made;
    `Interrupted` after Ctrl-C, when all is saved; `TrainingError` when a loss is not finite.
    """
    log, path = log or Log(), Path(path)
    check(settings)
    machine = this_machine(settings.training.device)
    if dry_run:
        resolve(settings, read_texts(settings, log), machine, log)
        return path
    with RunFolder.create(path, settings, to_toml(settings)) as folder:
        end = _end_of(folder)
        if end is not None and not has_prepared(folder):
            renew(RunFolder.open(path), log=log)  # names a file that is missing or damaged and cannot be made again
            log.say(f"{path} is finished already; translate with it, or name another folder with --run")
            return path
        if end is None:
            prepared = (find_prepared(folder, log) if folder.resumed else None) or _prepare(
                folder, settings, machine, log
            )
            best_update = _train(folder, prepared, machine, log).best_update
        else:
            best_update = end["best_update"]
        finish(folder, read_judged(folder), update=best_update, log=log)
    return path


def check(settings: Settings) -> None:
    """Refuse settings that cannot work, before any work is done."""
    model = resolve_preset(settings.model)
    check_model(model)
    if not settings.tokenizer.joint and model.tie == "three_way" and "tie" in settings.model.model_fields_set:
        raise SettingsError(
            "model.tie = 'three_way' needs one vocabulary: set tokenizer.joint = true, or model.tie = 'two_way'"
        )
    training = settings.training
    if training.optimizer is not None and training.optimizer not in OPTIMIZERS:
        hint = nearest(training.optimizer, OPTIMIZERS)
        raise SettingsError(f"training.optimizer = '{training.optimizer}'{hint}; allowed: {', '.join(OPTIMIZERS)}")
    if training.schedule is not None:
        find_schedule(training.schedule)
    metrics(settings.evaluation.tokenize, settings.evaluation.lowercase)
    longest = max(settings.data.max_length, settings.decoding.max_length) + 1
    if settings.model.positions == "learned" and settings.model.max_positions < longest:
        raise SettingsError(
            f"model.max_positions = {settings.model.max_positions}: learned positions must hold {longest}, "
            "the longer of data.max_length and decoding.max_length and one more"
        )


def resolve(asked: Settings, texts: Texts, machine: Machine, log: Log) -> tuple[Settings, Tokenizers]:
    """Choose what was left open, and tell; the vocabulary is learned on the way, as later choices need its tokens."""
    log.say(f"{texts.n_pairs:,} sentence pairs to train on, {len(texts.valid.pairs):,} to validate on")
    log.say(f"machine: {machine.describe()}")
    settings, choices = choose(Facts(asked, asked, machine, texts.n_pairs), BEFORE_TEXT)
    settings = settings.model_copy(update={"model": resolve_preset(settings.model)})
    check_model(settings.model)
    tokenizers = learn_vocabulary(texts, settings, log, may_grow=asked.tokenizer.vocab_size is None)
    settings = settings.with_values("tokenizer", vocab_size=max(tokenizers.n_src, tokenizers.n_tgt))
    tokens = count_tokens(texts, tokenizers, settings)
    settings, more = choose(Facts(asked, settings, machine, texts.n_pairs, tokens), BEFORE_TRAINING)
    if choices or more:
        log.say("chosen, as nothing else was said (--set section.key=value says it):")
        for line in table([*choices, *more]):
            log.say(line)
    return Settings.from_mapping(settings.model_dump(mode="json")), tokenizers


def _prepare(folder: RunFolder, asked: Settings, machine: Machine, log: Log) -> Prepared:
    """Bring the text into the folder. A user's mistake leaves no new folder behind."""
    with _removed_on_mistake(folder):
        texts = read_texts(asked, log)
        settings, tokenizers = resolve(asked, texts, machine, log)
        folder.write_settings(settings)
        return encode(folder, texts, tokenizers, settings, log)


def _train(folder: RunFolder, prepared: Prepared, machine: Machine, log: Log) -> TrainingResult:
    settings, training, tokenizers = folder.settings, folder.settings.training, prepared.tokenizers
    device = torch.device(machine.device)
    if device.type == "cpu":
        keep_freed_memory()
    torch.manual_seed(training.seed)
    model = build_model(settings.model, n_src=tokenizers.n_src, n_tgt=tokenizers.n_tgt).to(device)
    log.say(f"model: {count_parameters(model):,} weights")
    segment = None
    if settings.tokenizer.sampling:
        segment = SubwordSampling(tokenizers, settings.tokenizer.sampling, training.seed, settings.data.max_length)
    feeder = Feeder(prepared.train, training, device=device, weights=prepared.weights, segment=segment)
    _tell_padding(folder, feeder, log)
    precision = training.precision
    validator = Validator(
        model,
        lambda: _batches(prepared.valid, feeder.micro_budget, device),
        smoothing=training.label_smoothing,
        judge=_judge(prepared, settings) if prepared.judged else None,
        precision=precision,
    )
    updater = Updater(model, training, device=device, precision=precision)
    return loop.train(model, folder, updater=updater, feeder=feeder, validator=validator, log=log)


def _batches(store: TokenStore, budget: int, device: torch.device) -> Iterator[Batch]:
    """All pairs of a store, each once."""
    for indices in plan(store.src_lengths, store.tgt_lengths, budget=budget, seed=0, epoch=0):
        yield collate([Example(*store[int(i)]) for i in indices]).to(device)


def _judge(prepared: Prepared, settings: Settings) -> Judge:
    """Translates the judged pairs with the model as it stands, by the search of the settings."""
    sources, references = map(list, zip(*prepared.judged, strict=True))
    scoring = settings.evaluation

    def judge(model: nn.Module) -> dict[str, float]:
        translator = Translator(model, prepared.tokenizers, settings.decoding)
        hypotheses = [translation.text for translation in translator.translate(sources)]
        scores = evaluate(hypotheses, references, tokenize=scoring.tokenize, lowercase=scoring.lowercase)
        return {"bleu": scores.bleu.value, "chrf": scores.chrf.value}

    return judge


def _tell_padding(folder: RunFolder, feeder: Feeder, log: Log) -> None:
    """Say how much of the batches is padding, and keep it with the data report."""
    batches = feeder.plan(0)
    share = padding_share(batches, feeder.store.src_lengths, feeder.store.tgt_lengths)
    log.say(f"batches: {len(batches):,} an epoch, {share:.1%} padding")
    data = read_json(folder.path / "data.json")
    write_json(folder.path / "data.json", {**data, "padding": share})


def _end_of(folder: RunFolder) -> dict[str, Any] | None:
    """The event that training ended with, if it has."""
    events = MetricsFile(folder.path / "metrics.jsonl").read()
    return next((event for event in events if event["event"] == "end"), None)


@contextlib.contextmanager
def _removed_on_mistake(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except UserError:
        if not folder.resumed:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
