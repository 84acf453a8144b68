"""Defaults for unset settings of each task: a table of sizes, and rules with reasons.

Rules of `before_text` need to know the amount of text; those of `before_training` its number of tokens too. A setting
that was given never changes. The numbers are the best ones measured under benchmarks/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transduce.config.kinds import resolve_preset
from transduce.config.model import AttentionSettings
from transduce.tasks.choices import Answer, Defaults, Facts, Rules, Size, bytes_per_token

MIN_WARMUP, MAX_WARMUP = 10, 2000


def _for_vectors(value: Any, reason: str) -> Callable[[Facts], Answer]:
    """A rule for models whose source is vectors."""
    return lambda facts: (value, reason) if facts.settings.model.reads_vectors else None


def _vocab_size(facts: Facts) -> Answer:
    if facts.settings.model.reads_vectors and facts.settings.task == "classification":
        return None
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


def _context(facts: Facts) -> Answer:
    context, model = facts.size.context[facts.on_gpu], resolve_preset(facts.settings.model)
    if model.own_context is not None:
        return model.own_context, "model.segment_length"
    context = context if model.position_limit is None else min(context, model.position_limit)
    return context, f"tokens per row, for {facts.text} on the {facts.machine.device}"


def _rotary(facts: Facts) -> Answer:
    model = resolve_preset(facts.settings.model)
    if not isinstance(model, AttentionSettings) or model.key_width % 2:
        return None
    return "rotary", "relative positions are learned faster than absolute ones"


def _batch_tokens(facts: Facts) -> Answer:
    return facts.size.batch[facts.on_gpu], f"tokens per update, for {facts.text} on the {facts.machine.device}"


def _batch_of_rows(facts: Facts) -> Answer:
    context, n_rows = facts.settings.data.context or facts.size.context[facts.on_gpu], facts.size.batch[facts.on_gpu]
    return context * n_rows, f"{n_rows} rows of {context} tokens per update"


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
    if facts.on_gpu or facts.settings.model.d_model <= 256:
        return "muon", "learns more per epoch than Adam, at a small cost"
    return "adamw", "Muon's products are slow on a CPU at this width"


def _learning_rate(scale: float, *, only: str = "", reason: str = "peak", digits: int = 6) -> Callable[[Facts], Answer]:
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


_PRE_NORM = "pre", "learns faster than post-norm and needs less warm-up"
_UNSMOOTHED = 0.0, "smoothing would distort the probabilities"
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
FINE_TUNING: Rules = {
    "training.optimizer": ("adamw", "changes the initial weights only a little"),
    "training.lr": _learning_rate(0.04, reason="far below a fresh model's peak", digits=7),  # 3e-4 at 128, 5e-5 at 768
    "training.matrix_lr": _learning_rate(0.08, only="muon", reason="far below a fresh model's peak", digits=7),
    "training.max_epochs": lambda facts: (
        None if facts.has_limit else (3.0, "usual for fine-tuning; more fits the new text better and forgets more")
    ),
}
"""Rules that replace those of `before_training` in a run of any task that starts from another run's weights."""

_INF = float("inf")
TRANSLATION = Defaults(
    "pairs",
    tuple(
        Size(most=n, vocab_size=v, preset=preset, dropout=dropout, batch=batch, epochs=epochs, minutes=minutes)
        for n, v, preset, dropout, batch, epochs, minutes in (
            (2_000, 2_000, ("tiny", "tiny"), 0.3, (1024, 1024), 60, (10, 5)),
            (20_000, 4_000, ("tiny", "tiny"), 0.3, (2048, 2048), 40, (20, 10)),
            (50_000, 8_000, ("tiny", "small"), 0.2, (2048, 4096), 20, (30, 20)),
            (150_000, 8_000, ("small", "small"), 0.2, (4096, 8192), 20, (90, 30)),
            (1_000_000, 16_000, ("small", "base"), 0.1, (8192, 24_576), 15, (360, 240)),
            (_INF, 32_000, ("small", "base"), 0.1, (8192, 32_768), 10, (1440, 1440)),
        )
    ),
    {
        "tokenizer.joint": _for_vectors(False, "vectors have no vocabulary"),
        "tokenizer.vocab_size": _vocab_size,
        "data.max_ratio": _for_vectors(1e6, "there may be many more vectors than tokens"),
        "model.preset": _preset,
        "model.dropout": _dropout,
        "model.residual": _PRE_NORM,
        "model.tie": lambda facts: (
            None if facts.settings.tokenizer.joint else ("two_way", "each side has a vocabulary")
        ),
    },
    _TRAINING,
)
CAUSAL = Defaults(
    "bytes",
    tuple(
        Size(most=n, tokenizer=kind, vocab_size=vocab_size, preset=preset, dropout=dropout, context=context,
             batch=n_rows, epochs=epochs, minutes=minutes)
        for n, kind, vocab_size, preset, dropout, context, n_rows, epochs, minutes in (
            (3e5, "char", 512, ("gpt-tiny", "gpt-tiny"), 0.2, (64, 64), (16, 32), 60, (5, 3)),
            (2e6, "char", 512, ("gpt-tiny", "gpt-small"), 0.1, (128, 256), (32, 64), 30, (20, 10)),
            (2e7, "bpe", 2_000, ("gpt-tiny", "gpt-small"), 0.1, (128, 256), (32, 64), 10, (60, 30)),
            (2e8, "bpe", 8_000, ("gpt-small", "gpt-small"), 0.1, (256, 512), (32, 64), 4, (360, 120)),
            (_INF, "bpe", 16_000, ("gpt-small", "gpt2"), 0.0, (256, 1024), (32, 64), 2, (1440, 1440)),
        )
    ),
    {
        "tokenizer.exact": (True, "text is reproduced exactly, with line ends and rare characters"),
        "tokenizer.normalization": ("identity", "required by tokenizer.exact"),
        "tokenizer.kind": lambda facts: (facts.size.tokenizer, f"for {facts.text}"),
        "tokenizer.vocab_size": _vocab_size,
        "model.preset": _preset,
        "model.dropout": _dropout,
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
)  # fmt: skip
MASKED = Defaults(
    "bytes",
    (
        Size(most=2e6, vocab_size=2_000, preset=("bert-tiny", "bert-tiny"), dropout=0.1, batch=(4096, 8192),
             epochs=40, minutes=(20, 10)),
        Size(most=5e7, vocab_size=8_000, preset=("bert-tiny", "bert-mini"), dropout=0.1, batch=(4096, 16_384),
             epochs=15, minutes=(120, 60)),
        Size(most=_INF, vocab_size=16_000, preset=("bert-mini", "bert-small"), dropout=0.1, batch=(8192, 32_768),
             epochs=4, minutes=(1440, 720)),
    ),
    {
        "tokenizer.vocab_size": _vocab_size,
        "tokenizer.mask": (True, "the model predicts masked tokens"),
        "model.preset": _preset,
        "model.dropout": _dropout,
        "data.context": _context,
    },
    {
        **_TRAINING,
        "training.stop_by": ("loss", "the goal of the run"),
        "training.label_smoothing": _UNSMOOTHED,
    },
)  # fmt: skip
BERT_CLASSIFICATION = Defaults(
    "labelled texts",
    (
        Size(most=5_000, vocab_size=4_000, preset=("bert-tiny", "bert-tiny"), dropout=0.3, batch=(1024, 1024),
             epochs=20, minutes=(5, 3)),
        Size(most=200_000, vocab_size=8_000, preset=("bert-tiny", "bert-tiny"), dropout=0.3, batch=(2048, 4096),
             epochs=8, minutes=(15, 5)),
        Size(most=_INF, vocab_size=16_000, preset=("bert-mini", "bert-mini"), dropout=0.1, batch=(4096, 16_384),
             epochs=3, minutes=(120, 30)),
    ),
    {
        "tokenizer.vocab_size": _vocab_size,
        "model.preset": _preset,
        "model.dropout": _dropout,
        "model.pooling": _for_vectors("mean", "vectors have no [CLS]"),
    },
    {**_TRAINING, "training.stop_by": ("accuracy", "the goal of the run")},
)  # fmt: skip
CLASSIFICATION = replace(
    BERT_CLASSIFICATION,
    sizes=(
        Size(most=20_000, vocab_size=4_000, preset=("cnn", "cnn"), dropout=0.3, batch=(1024, 1024), epochs=20,
             minutes=(5, 3)),
        *BERT_CLASSIFICATION.sizes[1:],
    ),
)  # fmt: skip
"""Of single texts, unless the user has chosen the model: a CNN learns more from little text than attention does."""
