"""Choosing defaults for unset settings: what a default may depend on, and applying a task's rules in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transduce.config.kinds import preset_values
from transduce.config.model import ModelSettings
from transduce.config.settings import Settings
from transduce.machine import Machine

SIZE_KEYS = frozenset({"preset", "d_model", "d_ff", "n_heads", "n_encoder_layers", "n_decoder_layers"})
TOKENS_PER_PAIR = 15  # a guess at the target, until the text is encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Defaults for at most `most` pairs, labelled texts or bytes. Pairs of values are for (CPU, GPU).

    `batch`: tokens per update; for rows of running text (`context`), their number.
    """

    most: float
    vocab_size: int
    preset: tuple[str, str]
    dropout: float
    batch: tuple[int, int]
    epochs: float
    minutes: tuple[float, float]
    tokenizer: str = "unigram"
    context: tuple[int, int] = (128, 128)


@dataclass(frozen=True, slots=True)
class Facts:
    """All that a default may depend on.

    `amount`: of training text, in pairs, labelled texts or bytes. `tokens`: those of the longer side of all pairs, or
    of the text; None before encoding.
    """

    asked: Settings
    settings: Settings
    machine: Machine
    defaults: Defaults
    amount: int
    tokens: int | None = None

    @property
    def size(self) -> Size:
        return next(size for size in self.defaults.sizes if self.amount <= size.most)

    @property
    def text(self) -> str:
        """The amount of text, for people."""
        if self.defaults.unit != "bytes":
            return f"{self.amount:,} {self.defaults.unit}"
        name, n = next(((name, n) for name, n in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if self.amount >= n), ("", 1))
        return f"{self.amount / n:.3g} {name or 'bytes'} of text"

    @property
    def on_gpu(self) -> int:
        return int(self.machine.device == "cuda")

    @property
    def vocab_size(self) -> int:
        """Pieces of the larger vocabulary; 0 without one."""
        return self.settings.tokenizer.vocab_size or 0

    @property
    def batch_tokens(self) -> int:
        """Tokens per update."""
        return self.settings.training.batch_tokens or self.size.batch[self.on_gpu]

    @property
    def updates_per_epoch(self) -> float:
        """Updates in a pass over the data."""
        return max(1.0, (self.tokens or self.amount * TOKENS_PER_PAIR) / self.batch_tokens)

    @property
    def updates_per_minute(self) -> float:
        """A rough estimate from the size of the model and the speed of the machine."""
        work = 6.0 * parameters_used(self.settings.model, self.vocab_size)
        return 60.0 * self.machine.flops / (work * self.batch_tokens)

    @property
    def updates(self) -> float:
        """Updates until the nearest limit, roughly; at least 1."""
        training = self.settings.training
        ends = [
            training.max_updates,
            training.max_epochs and training.max_epochs * self.updates_per_epoch,
            training.max_minutes and training.max_minutes * self.updates_per_minute,
        ]
        return max(1.0, min(end for end in ends if end is not None))

    @property
    def has_limit(self) -> bool:
        training = self.asked.training
        return not (training.max_updates is training.max_epochs is training.max_minutes is None)


Answer = tuple[Any, str] | None
"""A value and the reason for it; None leaves the setting unset."""
Rules = Mapping[str, Answer | Callable[[Facts], Answer]]
"""By the name of a setting, in the order in which they apply: later rules see the earlier values."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """The defaults of a task. `unit`: of its amounts of text."""

    unit: str
    sizes: tuple[Size, ...]
    before_text: Rules
    before_training: Rules


@dataclass(frozen=True, slots=True)
class Choice:
    """An unset setting, its default, and the reason in one sentence."""

    section: str
    key: str
    value: Any
    reason: str


def choose(facts: Facts, rules: Rules) -> tuple[Settings, list[Choice]]:
    """The settings with the unset ones filled in, and what was filled in."""
    choices = []
    for name, rule in rules.items():
        section, key = name.split(".")
        if not _is_unset(facts, section, key) or (answer := rule(facts) if callable(rule) else rule) is None:
            continue
        choices.append(Choice(section, key, *answer))
        facts = replace(facts, settings=facts.settings.with_values(section, **{key: answer[0]}))
    return facts.settings, choices


def format_choices(choices: list[Choice]) -> list[str]:
    """Lines with the name, the value and the reason of each choice."""
    names = [f"{choice.section}.{choice.key}" for choice in choices]
    values = [f"{choice.value:,}" if type(choice.value) is int else str(choice.value) for choice in choices]
    widths = max(map(len, names), default=0), max(map(len, values), default=0)
    rows = zip(names, values, choices, strict=True)
    return [f"  {name:<{widths[0]}}  {value:>{widths[1]}}  {choice.reason}" for name, value, choice in rows]


def parameters_used(model: ModelSettings, vocab_size: int) -> int:
    """Weights that a target token passes through, roughly: the layers' and the output's."""
    return model.layer_parameters + vocab_size * model.d_model


def bytes_per_token(model: ModelSettings, vocab_size: int) -> int:
    """Memory of a training step per padded token on either side, roughly: activations kept for the gradient."""
    return 4 * (model.layer_activations + 3 * vocab_size)


def _is_unset(facts: Facts, section: str, key: str) -> bool:
    """Whether neither the user nor the preset has set it, and the architecture has it."""
    part = getattr(facts.asked, section)
    given = part.model_fields_set
    if key not in type(part).model_fields:
        return False
    if section == "model":
        own = preset_values(facts.settings.model)
        return not (given & SIZE_KEYS) if key == "preset" else key not in given and key not in own
    return key not in given or getattr(part, key) in (None, "auto")
