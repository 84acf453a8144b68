"""Defaults for unset settings: the facts that they depend on, the rules of each task, and the application of rules.

Each task has a table of sizes, by the amount of its text, and its own rules. A setting that was given never changes.
The numbers gave the best results in the measurements under benchmarks/.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from textwrap import TextWrapper
from typing import Any, NamedTuple

from transduce.config.architectures import preset_values, resolve_preset
from transduce.config.model import AttentionSettings
from transduce.config.settings import Settings
from transduce.machine import Machine

TOKENS_PER_PAIR = 15  # estimate for the target side, until the text is encoded
MOST_PARAGRAPHS = 0.2  # largest share of lines with several sentences in text of single sentences
MIN_WARMUP, MAX_WARMUP = 10, 2000


class Size(NamedTuple):
    """Defaults for training text of at most `most` pairs, labelled texts or bytes. Tuples of two are (CPU, GPU).

    `batch`: tokens per update or, for language models of the task causal, rows of `context` tokens per update.
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
    """The settings and the facts about text and machine on which defaults depend.

    asked: the settings that the user gave. settings: `asked` with the defaults so far. sizes: the task's table of
    sizes. amount: amount of training text in `unit`. tokens: number of training tokens, of the longer side of each
    pair; None before encoding. several_sentences: share of source lines with several sentences; None if unknown.
    """

    asked: Settings
    settings: Settings
    machine: Machine
    sizes: tuple[Size, ...]
    amount: int
    unit: str
    tokens: int | None = None
    several_sentences: float | None = None

    @property
    def size(self) -> Size:
        return next(size for size in self.sizes if self.amount <= size.most)

    @property
    def text(self) -> str:
        """The amount of text with its unit."""
        if not self.unit.startswith("bytes"):
            return f"{self.amount:,} {self.unit}"
        name, n = next(((name, n) for name, n in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if self.amount >= n), ("", 1))
        return f"{self.amount / n:.3g} {name or 'bytes'} of text"

    @property
    def on_gpu(self) -> int:
        return int(self.machine.device == "cuda")

    @property
    def vocab_size(self) -> int:
        """Number of pieces of the larger vocabulary; 0 without a vocabulary."""
        return self.settings.tokenizer.vocab_size or 0

    @property
    def batch_tokens(self) -> int:
        return self.settings.training.batch_tokens or self.size.batch[self.on_gpu]

    @property
    def updates_per_epoch(self) -> float:
        return max(1.0, (self.tokens or self.amount * TOKENS_PER_PAIR) / self.batch_tokens)

    @property
    def updates_per_minute(self) -> float:
        """A rough estimate of updates per minute, from the size of the model and the speed of the machine."""
        model = self.settings.model
        # parameters that a target token passes through
        parameters = model.layer_parameters + self.vocab_size * model.d_model
        return 60.0 * self.machine.flops / (6.0 * parameters * self.batch_tokens)

    @property
    def updates(self) -> float:
        """A rough estimate of the number of updates until the first limit is reached; at least 1."""
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
"""The default of a setting and the reason for it; None leaves the setting unset."""
Rule = Answer | Callable[[Facts], Answer]
Rules = Mapping[str, Rule]
"""Rules by the name of their setting, in the order of application: later rules see the values of earlier rules."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """The defaults of a task: its table of sizes, rules that apply before the text is encoded, and rules for after."""

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
    """Apply rules to unset settings; return the new settings and the list of chosen defaults."""
    choices = []
    for name, rule in rules.items():
        section, key = name.split(".")
        if not _is_unset(facts, section, key) or (answer := rule(facts) if callable(rule) else rule) is None:
            continue
        choices.append(Choice(name, *answer))
        facts = replace(facts, settings=facts.settings.with_values(section, **{key: answer[0]}))
    return facts.settings, choices


def _is_unset(facts: Facts, section: str, key: str) -> bool:
    """Whether a setting exists in the architecture and is set neither by the user nor by the preset."""
    part = getattr(facts.asked, section)
    given = part.model_fields_set
    if key not in type(part).model_fields:
        return False
    if section == "model":
        own = preset_values(facts.settings.model)
        return not (given & part.size_keys()) if key == "preset" else key not in given and key not in own
    return key not in given


def format_choices(choices: list[Choice], *, width: int = sys.maxsize) -> list[str]:
    """Format each choice as a line with name, value and reason; lines are wrapped at `width` columns."""
    values = [f"{choice.value:,}" if type(choice.value) is int else str(choice.value) for choice in choices]
    widths = max((len(choice.name) for choice in choices), default=0), max(map(len, values), default=0)
    fold = TextWrapper(width, subsequent_indent=" " * (sum(widths) + 6), break_long_words=False, break_on_hyphens=False)
    return [
        fold.fill(f"  {choice.name:<{widths[0]}}  {value:>{widths[1]}}  {choice.reason}")
        for choice, value in zip(choices, values, strict=True)
    ]


def bytes_per_token(settings: Settings) -> int:
    """Estimate the memory of a training step per padded token: float32 activations kept for the gradient."""
    model, activations = settings.model, settings.model.layer_activations
    if settings.training.recompute:  # the inputs of all blocks, and the activations of one
        n_blocks = sum(model.depth)
        activations = activations // n_blocks + n_blocks * model.d_model
    n_passes = 1 if settings.training.consistency is None else 2
    # the usual loss of a frozen table takes the vocabulary in parts
    in_parts = settings.training.lora is not None and n_passes == 1
    vocab_size = 0 if in_parts else settings.tokenizer.vocab_size or 0
    return 4 * n_passes * (activations + 3 * vocab_size)


def _vocab_size(facts: Facts) -> Answer:
    if facts.settings.tokenizer.kind == "char":
        return 4_096, "upper limit: the characters of the text, and 256 bytes for all others"
    return facts.size.vocab_size, f"for {facts.text}: each piece must be frequent enough to be learned"


def _split(facts: Facts) -> Answer:
    share = facts.several_sentences
    if share is None:
        return None
    return share <= MOST_PARAGRAPHS, f"{100 * share:.0f} % of the source lines have several sentences"


def _preset(facts: Facts) -> Answer:
    preset, where = facts.size.preset[facts.on_gpu], "with" if facts.on_gpu else "without"
    model = facts.settings.model
    if preset not in model.presets:  # another architecture than the task's default: use its preset of the same size
        preset = f"{model.kind}-{preset.rpartition('-')[2]}"
    if preset not in model.presets:
        return None
    if preset == "cnn":
        return preset, f"for {facts.text}: needs fewer than a Transformer (bert-tiny)"
    return preset, f"for {facts.text} {where} a GPU"


def _dropout(facts: Facts) -> Answer:
    dropout = facts.size.dropout
    return dropout, "small data needs more" if dropout > 0.1 else "enough text"


def _context(facts: Facts) -> Answer:
    context, model = facts.size.context[facts.on_gpu], resolve_preset(facts.settings.model)
    if model.own_context is not None:
        return model.own_context, "model.segment_length"
    context = context if model.position_limit is None else min(context, model.position_limit)
    return context, f"tokens per row, for {facts.text} on the {facts.machine.device}"


def _batch_tokens(facts: Facts) -> Answer:
    return facts.size.batch[facts.on_gpu], f"tokens per update, for {facts.text} on the {facts.machine.device}"


def _micro_batch_tokens(facts: Facts) -> Answer:
    wanted = facts.batch_tokens
    per_token = bytes_per_token(facts.settings)
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


def _learning_rate(scale: float, *, only: str = "", reason: str = "peak", digits: int = 6) -> Callable[[Facts], Answer]:
    """Return a rule for a learning rate of `scale` / d_model. `only`: the only optimizer with this default, if any."""

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


_PRE_NORM = "pre", "learns faster than post-norm and needs less warm-up"
_UNSMOOTHED = 0.0, "smoothing would distort the probabilities"
_MODEL: Rules = {"tokenizer.vocab_size": _vocab_size, "model.preset": _preset, "model.dropout": _dropout}
_TRAINING: Rules = {
    "training.batch_tokens": _batch_tokens,
    "training.micro_batch_tokens": _micro_batch_tokens,
    "training.precision": _precision,
    "training.optimizer": _optimizer,
    "training.lr": _learning_rate(0.64),  # 0.005 at width 128, 0.00125 at 512
    "training.matrix_lr": _learning_rate(1.28, only="muon"),
    "training.max_epochs": _max_epochs,
    "training.max_minutes": _max_minutes,
    "training.schedule": ("linear", "falls to zero at the end: better than the paper's in a short training"),
    "training.warmup_updates": _warmup_updates,
    "training.valid_updates": _valid_updates,
}
_BASE_RATE = _learning_rate(0.04, reason="far below a fresh model's peak", digits=7)  # 3e-4 at 128, 5e-5 at 768
_ADAPTER_RATE = _learning_rate(0.4, reason="of adapters, which begin at zero,", digits=7)
FINE_TUNING: Rules = {
    "training.optimizer": ("adamw", "changes the initial weights only a little"),
    "training.lr": lambda facts: (_BASE_RATE if facts.settings.training.lora is None else _ADAPTER_RATE)(facts),
    "training.matrix_lr": _learning_rate(0.08, only="muon", reason="far below a fresh model's peak", digits=7),
    "training.max_epochs": lambda facts: (
        None if facts.has_limit else (3.0, "usual for fine-tuning; more fits the new text better and forgets more")
    ),
}
"""Rules added to `before_training`, with precedence, in a run of any task that starts from another run's weights."""


def _bleu_tokenizer(facts: Facts) -> Answer:
    from transduce.evaluation.metrics import choose_tokenizer  # loads NumPy

    targets = {tgt for _, tgt in facts.settings.data.directions}
    return choose_tokenizer(*targets) if len(targets) == 1 else None  # else each set has its own


TRANSLATION = Defaults(
    (  # most, vocab_size, preset, dropout, batch, epochs, minutes
        Size(2_000, 2_000, ("tiny", "tiny"), 0.3, (1024, 1024), 60, (10, 5)),
        Size(20_000, 4_000, ("tiny", "tiny"), 0.3, (2048, 2048), 40, (20, 10)),
        Size(50_000, 8_000, ("tiny", "small"), 0.2, (2048, 4096), 20, (30, 20)),
        Size(150_000, 8_000, ("small", "small"), 0.2, (4096, 8192), 20, (90, 30)),
        Size(1_000_000, 16_000, ("small", "base"), 0.1, (8192, 24_576), 15, (360, 240)),
        Size(math.inf, 32_000, ("small", "base"), 0.1, (8192, 32_768), 10, (1440, 1440)),
    ),
    {
        "tokenizer.placeholders": (8, "names and unknown characters are copied"),
        **_MODEL,
        "model.residual": _PRE_NORM,
        "model.tie": lambda facts: (
            None if facts.settings.tokenizer.joint else ("two_way", "each side has a vocabulary")
        ),
        "decoding.split": _split,
        "evaluation.tokenize": _bleu_tokenizer,
    },
    _TRAINING,
)


def _rotary(facts: Facts) -> Answer:
    model = resolve_preset(facts.settings.model)
    if not isinstance(model, AttentionSettings) or model.key_width % 2:
        return None
    return "rotary", "relative positions are learned faster than absolute ones"


def _batch_of_rows(facts: Facts) -> Answer:
    context, n_rows = facts.settings.data.context or facts.size.context[facts.on_gpu], facts.size.batch[facts.on_gpu]
    return context * n_rows, f"{n_rows} rows of {context} tokens per update"


CAUSAL = Defaults(
    (  # most, vocab_size, preset, dropout, batch (rows), epochs, minutes, tokenizer, context
        Size(3e5, 512, ("gpt-tiny", "gpt-tiny"), 0.2, (16, 32), 60, (5, 3), "char", (64, 64)),
        Size(2e6, 512, ("gpt-tiny", "gpt-small"), 0.1, (32, 64), 30, (20, 10), "char", (128, 256)),
        Size(2e7, 2_000, ("gpt-tiny", "gpt-small"), 0.1, (32, 64), 10, (60, 30), "bpe", (128, 256)),
        Size(2e8, 8_000, ("gpt-small", "gpt-small"), 0.1, (32, 64), 4, (360, 120), "bpe", (256, 512)),
        Size(math.inf, 16_000, ("gpt-small", "gpt2"), 0.0, (32, 64), 2, (1440, 1440), "bpe", (256, 1024)),
    ),
    {
        "tokenizer.exact": (True, "text is reproduced exactly, with line ends and rare characters"),
        "tokenizer.normalization": ("identity", "required by tokenizer.exact"),
        "tokenizer.kind": lambda facts: (facts.size.tokenizer, f"for {facts.text}"),
        **_MODEL,
        "model.residual": _PRE_NORM,
        "model.positions": _rotary,
        "model.activation": ("gelu", "GPT's"),
        "data.context": _context,
        "model.segment_length": lambda facts: (facts.settings.data.context, "data.context"),
    },
    {
        **_TRAINING,
        "training.label_smoothing": _UNSMOOTHED,
        "training.batch_tokens": _batch_of_rows,
        "training.lr": _learning_rate(0.384),  # 0.003 at width 128
        "training.matrix_lr": _learning_rate(0.768, only="muon"),
    },
)
MASKED = Defaults(
    (  # most, vocab_size, preset, dropout, batch, epochs, minutes
        Size(2e6, 2_000, ("bert-tiny", "bert-tiny"), 0.1, (4096, 8192), 40, (20, 10)),
        Size(5e7, 8_000, ("bert-tiny", "bert-mini"), 0.1, (4096, 16_384), 15, (120, 60)),
        Size(math.inf, 16_000, ("bert-mini", "bert-small"), 0.1, (8192, 32_768), 4, (1440, 720)),
    ),
    {
        **_MODEL,
        "tokenizer.mask": (True, "the model predicts masked tokens"),
        "data.context": _context,
    },
    {
        **_TRAINING,
        "training.stop_by": ("loss", "the goal of the run"),
        "training.label_smoothing": _UNSMOOTHED,
    },
)
BERT_CLASSIFICATION = Defaults(
    (  # most, vocab_size, preset, dropout, batch, epochs, minutes
        Size(5_000, 4_000, ("bert-tiny", "bert-tiny"), 0.3, (1024, 1024), 20, (5, 3)),
        Size(200_000, 8_000, ("bert-tiny", "bert-tiny"), 0.3, (2048, 4096), 8, (15, 5)),
        Size(math.inf, 16_000, ("bert-mini", "bert-mini"), 0.1, (4096, 16_384), 3, (120, 30)),
    ),
    _MODEL,
    {**_TRAINING, "training.stop_by": ("accuracy", "the goal of the run")},
)
CLASSIFICATION = replace(
    BERT_CLASSIFICATION,
    sizes=(Size(20_000, 4_000, ("cnn", "cnn"), 0.3, (1024, 1024), 20, (5, 3)), *BERT_CLASSIFICATION.sizes[1:]),
)
"""Defaults for classifiers of single texts without model settings: a CNN learns more from little text."""

DEFAULTS: dict[str, Defaults] = {
    "translation": TRANSLATION,
    "causal": CAUSAL,
    "masked": MASKED,
    "classification": CLASSIFICATION,
}
"""The defaults of each task, by its name."""
