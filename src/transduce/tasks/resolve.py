"""From the settings that a user gave to complete settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transduce.config import Settings, resolve_preset
from transduce.errors import SettingsError, nearest
from transduce.logging import Log
from transduce.machine import Machine
from transduce.models.registry import check_model
from transduce.tasks.base import Task
from transduce.tasks.choices import choose, format_choices
from transduce.tasks.defaults import FINE_TUNING
from transduce.tasks.registry import check_task, find_task
from transduce.tasks.vocabulary import learn_vocabulary
from transduce.text.tokenizer import Tokenizers
from transduce.training.optim import OPTIMIZERS
from transduce.training.schedule import find_schedule

AnyTask = Task[Any, Any]


def check(settings: Settings) -> AnyTask:
    """Refuse settings that cannot work, before any work is done, and return their task."""
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
    """Fill in unset settings, report them, and train the vocabulary unless it is `known`: later defaults need it.

    `scale`: the amount of text as a multiple of `texts`, where these are a sample.
    """
    log.say(f"machine: {machine.describe()}")
    facts = task.facts(asked, texts, machine)
    facts = replace(facts, amount=round(facts.amount * scale))
    settings, choices = choose(facts, task.defaults.before_text)
    settings = settings.model_copy(update={"model": resolve_preset(settings.model)})
    check_model(settings.model)
    check_task(task, settings, settings.model)
    tokenizers = known or learn_vocabulary(
        lambda: task.lines(texts, settings), settings, log, may_grow=asked.tokenizer.vocab_size is None
    )
    settings = settings.with_values("tokenizer", vocab_size=max(tokenizers.n_src, tokenizers.n_tgt))
    tokens = round(task.count_tokens(texts, tokenizers, settings) * scale)
    rules = task.defaults.before_training
    if asked.training.start is not None:
        rules = {**rules, **FINE_TUNING}
    settings, more = choose(replace(facts, settings=settings, tokens=tokens), rules)
    if choices or more:
        log.say("defaults for unset settings (override with --set section.key=value):")
        for line in format_choices([*choices, *more]):
            log.say(line)
    return Settings.from_mapping(settings.model_dump(mode="json")), tokenizers
