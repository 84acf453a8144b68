"""From the settings that a user gave to complete settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from transduce.config.kinds import kinds_for, resolve_preset
from transduce.config.model import ModelSettings
from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.errors import SettingsError, VocabularyTooSmall, check_known
from transduce.logging import Log
from transduce.machine import Machine
from transduce.metrics_log import check_trackers
from transduce.models.registry import ARCHITECTURES, check_model
from transduce.tasks.defaults import FINE_TUNING, choose, format_choices
from transduce.tasks.registry import TASKS, AnyTask, find_task
from transduce.text.tokenizer import Tokenizers
from transduce.text.training import train_tokenizers
from transduce.text.vectors import VectorReader, is_vectors
from transduce.training.optim import OPTIMIZERS
from transduce.training.schedule import SCHEDULES

Lines = Callable[[], tuple[Iterable[str], Iterable[str]]]
"""Yields the training text of both sides, from its start at each call; the second is empty if there is one side."""


def check(settings: Settings) -> AnyTask:
    """Refuse settings that cannot work, before any work is done, and return their task."""
    task, training, model = find_task(settings.task), settings.training, resolve_preset(settings.model)
    check_model(model)
    check_trackers(training.track)
    if training.start is None:  # else the architecture is that of a run
        for problem in ARCHITECTURES[model.kind].unused(model):
            raise SettingsError(f"{problem}; change one of them")
    if training.optimizer is not None:
        check_known("training.optimizer", training.optimizer, OPTIMIZERS)
    if training.optimizer == "muon" and training.parallel == "shard":
        raise SettingsError(
            "training.optimizer = 'muon': it needs whole matrices, which training.parallel = 'shard' divides; "
            "use adamw or adam"
        )
    if training.schedule is not None:
        check_known("training.schedule", training.schedule, SCHEDULES)
    if model.kind not in (kinds := kinds_for(task.name)):
        raise SettingsError(f"model.kind = '{model.kind}' does not fit task '{task.name}'; use {' or '.join(kinds)}")
    for name in sorted(frozenset[str]().union(*(other.uses for other in TASKS.values())) - task.uses):
        section, key = name.split(".")
        part = getattr(settings, section)
        if key in part.model_fields_set and getattr(part, key) != type(part).model_fields[key].default:
            raise SettingsError(f"{name} has no effect in task '{task.name}'; leave it out")
    _check_sources(settings, model)
    task.check(settings, model)
    return task


def _check_sources(settings: Settings, model: ModelSettings) -> None:
    """Refuse files of vectors that the model does not read."""
    for corpus in (*settings.data.train, *settings.data.valid, *settings.data.test):
        if corpus.tgt is not None and is_vectors(corpus.tgt):
            raise SettingsError(f"tgt = '{corpus.tgt}': a file of vectors; only a source can be one")
        for path in filter(None, (corpus.src, corpus.path)):
            if is_vectors(path) and not model.reads_vectors:
                raise SettingsError(f"{path} is a file of vectors; set model.source = 'vectors' to read it")
            if model.reads_vectors and not is_vectors(path):  # a file of names would not show that vectors changed
                raise SettingsError(f"{path}: model.source = 'vectors' needs files of vectors (.safetensors)")


def learn_vocabulary(lines: Lines, settings: Settings, log: Log, *, may_grow: bool) -> Tokenizers:
    """Train the vocabulary on the training text; with `may_grow`, a larger one if its characters need it."""
    size = resolved(settings.tokenizer.vocab_size, "tokenizer.vocab_size")
    try:
        found = train_tokenizers(*lines(), settings.tokenizer, vocab_size=size)
    except VocabularyTooSmall as error:
        if not may_grow:
            raise
        size = error.needed + error.needed // 2
        log.say(f"the text has many different characters: the vocabulary grows to {size:,} pieces")
        return learn_vocabulary(lines, settings.with_values("tokenizer", vocab_size=size), log, may_grow=False)
    n = min(found.n_src, found.n_tgt)
    if n < size and not (settings.tokenizer.kind == "char" and settings.tokenizer.exact):  # which has all characters
        report = log.say if may_grow else log.warn  # a given size that is not reached is worth a warning
        report(f"vocabulary: {n:,} pieces instead of {size:,}; the text does not support more")
    return found


def _learn_target_vocabulary(lines: Lines, settings: Settings, log: Log, *, may_grow: bool) -> Tokenizers:
    """A reader of source vectors, and the vocabulary of the target text if there is any."""
    names, targets = lines()
    reader = VectorReader.of(names)
    log.say(f"source: vectors of {reader.width:,} numbers")
    if next(iter(targets), None) is None:
        return Tokenizers(reader, reader)
    alone = settings.with_values("tokenizer", joint=True)
    return Tokenizers(reader, learn_vocabulary(lambda: (lines()[1], ()), alone, log, may_grow=may_grow).tgt)


def resolve(
    task: AnyTask,
    asked: Settings,
    texts: Any,
    machine: Machine,
    log: Log,
    *,
    known: Tokenizers | None = None,
    scale: float = 1.0,
) -> tuple[Settings, Tokenizers]:
    """Fill in unset settings, report them, and train the vocabulary unless it is `known`: later defaults need it.

    `scale`: the amount of text as a multiple of `texts`, where these are a sample.
    """
    log.say(f"machine: {machine.describe()}")
    facts = task.facts(asked, texts, machine)
    facts = replace(facts, amount=round(facts.amount * scale))
    settings, choices = choose(facts, task.defaults.before_text)
    settings = settings.model_copy(update={"model": resolve_preset(settings.model)})
    check(settings)
    may_grow = asked.tokenizer.vocab_size is None
    learn = _learn_target_vocabulary if settings.model.reads_vectors else learn_vocabulary
    tokenizers = known or learn(lambda: task.lines(texts), settings, log, may_grow=may_grow)
    if isinstance(tokenizers.src, VectorReader) != settings.model.reads_vectors:
        read = "text" if settings.model.reads_vectors else "vectors"
        raise SettingsError(
            f"tokenizer.start = '{settings.tokenizer.start}': the source of that run is {read}, unlike model.source; "
            "name another run"
        )
    sizes = [side.vocab_size for side in (tokenizers.src, tokenizers.tgt) if not isinstance(side, VectorReader)]
    settings = settings.with_values("tokenizer", vocab_size=max(sizes, default=None))
    tokens = round(task.count_tokens(texts, tokenizers) * scale)
    rules = task.defaults.before_training
    if asked.training.start is not None:
        rules = {**rules, **FINE_TUNING}
    settings, more = choose(replace(facts, settings=settings, tokens=tokens), rules)
    if choices or more:
        log.say("defaults for unset settings, each of which can be set:")
        for line in format_choices([*choices, *more]):
            log.say(line)
    return Settings.from_mapping(settings.model_dump(mode="json")), tokenizers
