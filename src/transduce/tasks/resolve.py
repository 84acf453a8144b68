"""From the settings that a user gave to settings with nothing left to choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transduce.config import Settings, resolve_preset
from transduce.config.model import kinds_for
from transduce.errors import SettingsError, nearest
from transduce.logging import Log
from transduce.machine import Machine
from transduce.models.registry import check_model
from transduce.tasks.base import Task
from transduce.tasks.defaults import choose, laid_over, table
from transduce.tasks.defaults_finetune import BEFORE_FINE_TUNING
from transduce.tasks.finetune import Start, find_start
from transduce.tasks.registry import check_task, find_task
from transduce.tasks.vocabulary import learn_vocabulary
from transduce.text.tokenizer import Tokenizers
from transduce.training.optim import OPTIMIZERS
from transduce.training.schedule import find_schedule

AnyTask = Task[Any, Any]


def start_of(settings: Settings) -> Start | None:
    """The run that a training with these settings begins with, if any. Raises `UserError` as `find_start`."""
    task = find_task(settings.task)
    return find_start(settings, kind=kinds_for(task.name)[0], inherited=task.inherited)


def check(settings: Settings) -> AnyTask:
    """Refuse settings that cannot work, before any work is done; the task that they ask for."""
    task, model = find_task(settings.task), resolve_preset(settings.model)
    check_model(model)
    training = settings.training
    if training.optimizer is not None and training.optimizer not in OPTIMIZERS:
        hint = nearest(training.optimizer, OPTIMIZERS)
        raise SettingsError(f"training.optimizer = '{training.optimizer}'{hint}; allowed: {', '.join(OPTIMIZERS)}")
    if training.schedule is not None:
        find_schedule(training.schedule)
    check_task(task, settings, model)
    return task


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
    """Choose what was left open, and tell; the vocabulary, if not `known`, is learned on the way.

    Later choices need its tokens. `scale`: how many times more text there is than `texts`, where they are a sample.
    """
    log.say(f"machine: {machine.describe()}")
    facts = task.facts(asked, texts, machine)
    facts = replace(facts, n_pairs=round(facts.n_pairs * scale), n_bytes=round(facts.n_bytes * scale))
    settings, choices = choose(facts, task.before_text)
    settings = settings.model_copy(update={"model": resolve_preset(settings.model)})
    check_model(settings.model)
    check_task(task, settings, settings.model)
    tokenizers = known or learn_vocabulary(
        lambda: task.lines(texts, settings), settings, log, may_grow=asked.tokenizer.vocab_size is None
    )
    settings = settings.with_values("tokenizer", vocab_size=max(tokenizers.n_src, tokenizers.n_tgt))
    tokens = round(task.count_tokens(texts, tokenizers, settings) * scale)
    choosers = task.before_training
    if asked.training.start is not None:
        choosers = laid_over(BEFORE_FINE_TUNING, choosers)
    settings, more = choose(replace(facts, settings=settings, tokens=tokens), choosers)
    if choices or more:
        log.say("chosen, as nothing else was said (--set section.key=value says it):")
        for line in table([*choices, *more]):
            log.say(line)
    return Settings.from_mapping(settings.model_dump(mode="json")), tokenizers
