"""Defaults for unset settings: what they depend on, the rules that tasks share, and how rules are applied.

Each task has a table of sizes, by the amount of its text, and its own rules. A setting that was given never changes.
The numbers are the best ones measured under benchmarks/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transduce.config.kinds import preset_values, resolve_preset
from transduce.config.model import ModelSettings
from transduce.config.settings import Settings
from transduce.machine import Machine

SIZE_KEYS = frozenset({"preset", "d_model", "d_ff", "n_heads", "n_encoder_layers", "n_decoder_layers"})
TOKENS_PER_PAIR = 15  # a guess at the target, until the text is encoded
MIN_WARMUP, MAX_WARMUP = 10, 2000


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that a default may depend on.

    `asked`: the settings that were given; `settings`: the same with the defaults so far. `amount`: of training text, in
    `unit`. `tokens`: those of the longer side of all pairs, or of the text; None before encoding.
    """

    asked: Settings
    settings: Settings
    machine: Machine
    sizes: tuple[Size, ...]
    amount: int
    unit: str
    tokens: int | None = None

    @property
    def size(self) -> Size:
        return next(size for size in self.sizes if self.amount <= size.most)

    @property
    def text(self) -> str:
        """The amount of text, for people."""
        if not self.unit.startswith("bytes"):
            return f"{self.amount:,} {self.unit}"
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
        model = self.settings.model
        parameters = model.layer_parameters + self.vocab_size * model.d_model  # that a target token passes through
        return 60.0 * self.machine.flops / (6.0 * parameters * self.batch_tokens)

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
Rule = Answer | Callable[[Facts], Answer]
Rules = Mapping[str, Rule]
"""By the name of a setting, in the order in which they apply: later rules see the earlier values."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """The defaults of a task. Rules of `before_training` need the number of tokens, those of `before_text` do not."""

    sizes: tuple[Size, ...]
    before_text: Rules
    before_training: Rules


@dataclass(frozen=True, slots=True)
class Choice:
    """An unset setting, its default, and the reason in one sentence."""

    name: str
    value: Any
    reason: str


def choose(facts: Facts, rules: Rules) -> tuple[Settings, list[Choice]]:
    """The settings with the unset ones filled in, and what was filled in."""
    choices = []
    for name, rule in rules.items():
        section, key = name.split(".")
        if not _is_unset(facts, section, key) or (answer := rule(facts) if callable(rule) else rule) is None:
            continue
        choices.append(Choice(name, *answer))
        facts = replace(facts, settings=facts.settings.with_values(section, **{key: answer[0]}))
    return facts.settings, choices


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


def format_choices(choices: list[Choice]) -> list[str]:
    """Lines with the name, the value and the reason of each choice."""
    values = [f"{choice.value:,}" if type(choice.value) is int else str(choice.value) for choice in choices]
    widths = max((len(choice.name) for choice in choices), default=0), max(map(len, values), default=0)
    return [
        f"  {choice.name:<{widths[0]}}  {value:>{widths[1]}}  {choice.reason}"
        for choice, value in zip(choices, values, strict=True)
    ]


def bytes_per_token(model: ModelSettings, vocab_size: int, *, number: int = 4) -> int:
    """Memory of a training step per padded token on either side, roughly: activations kept for the gradient.

    `number`: bytes of one of them.
    """
    return number * (model.layer_activations + 3 * vocab_size)


def for_vectors(value: Any, reason: str) -> Rule:
    """A rule for models whose source is vectors."""
    return lambda facts: (value, reason) if facts.settings.model.reads_vectors else None


def choose_vocab_size(facts: Facts) -> Answer:
    if facts.settings.tokenizer.kind == "char":
        return 4_096, "upper limit: the characters of the text, and 256 bytes for all others"
    return facts.size.vocab_size, f"for {facts.text}: each piece must be frequent enough to be learned"


def _preset(facts: Facts) -> Answer:
    preset, where = facts.size.preset[facts.on_gpu], "with" if facts.on_gpu else "without"
    model = facts.settings.model
    if preset not in model.presets:  # not the task's default architecture: the same size of this one
        preset = f"{model.kind}-{preset.rpartition('-')[2]}"
    if preset not in model.presets:
        return None
    if preset == "cnn":
        return preset, f"for {facts.text}: needs fewer than a Transformer (bert-tiny)"
    return preset, f"for {facts.text} {where} a GPU"


def _dropout(facts: Facts) -> Answer:
    dropout = facts.size.dropout
    return dropout, "small data needs more" if dropout > 0.1 else "enough text"


def choose_context(facts: Facts) -> Answer:
    context, model = facts.size.context[facts.on_gpu], resolve_preset(facts.settings.model)
    if model.own_context is not None:
        return model.own_context, "model.segment_length"
    context = context if model.position_limit is None else min(context, model.position_limit)
    return context, f"tokens per row, for {facts.text} on the {facts.machine.device}"


def _batch_tokens(facts: Facts) -> Answer:
    return facts.size.batch[facts.on_gpu], f"tokens per update, for {facts.text} on the {facts.machine.device}"


def _micro_batch_tokens(facts: Facts) -> Answer:
    wanted = facts.batch_tokens
    per_token = bytes_per_token(facts.settings.model, facts.vocab_size)
    fitting = max(256, facts.machine.memory // 2 // per_token)
    if fitting >= wanted:
        return wanted, f"a whole update fits in half of the {facts.machine.memory / 2**30:.0f} GiB free"
    n = -(-wanted // fitting)
    return -(-wanted // n), f"an update in {n} parts, each in half of the {facts.machine.memory / 2**30:.1f} GiB free"


def _precision(facts: Facts) -> Answer:
    has = "has" if facts.machine.precision == "bfloat16" else "does not have"
    return facts.machine.precision, f"this machine {has} instructions for bfloat16"


def _optimizer(facts: Facts) -> Answer:
    if facts.settings.training.parallel == "shard":
        return "adamw", "Muon needs whole matrices"
    if facts.on_gpu or facts.settings.model.d_model <= 256:
        return "muon", "learns more per epoch than Adam, at a small cost"
    return "adamw", "Muon's products are slow on a CPU at this width"


def learning_rate(scale: float, *, only: str = "", reason: str = "peak", digits: int = 6) -> Rule:
    """A rule for `scale` / d_model; `only` for this optimizer, if named."""

    def rule(facts: Facts) -> Answer:
        optimizer, width = facts.settings.training.optimizer, facts.settings.model.d_model
        if only and optimizer != only:
            return None
        return round(scale / width, digits), f"{reason} for {optimizer}{' matrices' if only else ''} at d_model {width}"

    return rule


def _max_epochs(facts: Facts) -> Answer:
    return None if facts.has_limit else (facts.size.epochs, f"more passes over {facts.text} gain little")


def _max_minutes(facts: Facts) -> Answer:
    if facts.has_limit:
        return None
    reason = "default time budget for this amount of text; training stops at whichever limit comes first"
    return facts.size.minutes[facts.on_gpu], reason


def _warmup_updates(facts: Facts) -> Answer:
    share, half = 0.08 * facts.updates, facts.updates / 2
    updates = max(1, round(min(MAX_WARMUP, max(MIN_WARMUP, share), half)))
    expected = f"the expected updates ({facts.updates:,.0f})"
    if half < MIN_WARMUP:
        return updates, f"half of {expected}"
    if share < MIN_WARMUP:
        return updates, f"the minimum: 8 % of {expected} are fewer"
    if share > MAX_WARMUP:
        return updates, f"the maximum: 8 % of {expected} are more"
    return updates, f"about 8 % of {expected}"


def _valid_updates(facts: Facts) -> Answer:
    updates = min(max(facts.updates_per_epoch, facts.updates_per_minute / 2), facts.updates / 5)
    return max(1, round(updates)), "about an epoch, or half a minute if epochs are shorter"


PRE_NORM = "pre", "learns faster than post-norm and needs less warm-up"
UNSMOOTHED = 0.0, "smoothing would distort the probabilities"
MODEL: Rules = {"tokenizer.vocab_size": choose_vocab_size, "model.preset": _preset, "model.dropout": _dropout}
TRAINING: Rules = {
    "training.batch_tokens": _batch_tokens,
    "training.micro_batch_tokens": _micro_batch_tokens,
    "training.precision": _precision,
    "training.optimizer": _optimizer,
    "training.lr": learning_rate(0.64),  # 0.005 at width 128, 0.00125 at 512
    "training.matrix_lr": learning_rate(1.28, only="muon"),
    "training.max_epochs": _max_epochs,
    "training.max_minutes": _max_minutes,
    "training.schedule": ("linear", "falls to zero at the end: better than the paper's in a short training"),
    "training.warmup_updates": _warmup_updates,
    "training.valid_updates": _valid_updates,
}
FINE_TUNING: Rules = {
    "training.optimizer": ("adamw", "changes the initial weights only a little"),
    "training.lr": learning_rate(0.04, reason="far below a fresh model's peak", digits=7),  # 3e-4 at 128, 5e-5 at 768
    "training.matrix_lr": learning_rate(0.08, only="muon", reason="far below a fresh model's peak", digits=7),
    "training.max_epochs": lambda facts: (
        None if facts.has_limit else (3.0, "usual for fine-tuning; more fits the new text better and forgets more")
    ),
}
"""Rules that replace those of `before_training` in a run of any task that starts from another run's weights."""
