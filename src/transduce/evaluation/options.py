"""The options of `transduce evaluate`: a class for each task, whose fields are the options, with their help
texts and, of some numbers, the least value.

The command line is built from these classes, so this module does not import PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from transduce.config.decoding import DecodingOptions

BatchTokens = Annotated[int | None, "Tokens per batch where PyTorch computes (default: the run's setting).", 1]
PlainText = Annotated[Path, "Plain text, for a language model or a masked language model."]


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationEvaluation:
    """Options of the evaluation of a translator: test text, decoding and scoring."""

    src: Annotated[Path, "Source text."]
    ref: Annotated[Path, "Reference translations, aligned line by line."]
    hyp: Annotated[Path | None, "Score these translations instead of those of RUN."] = None
    against: Annotated[Path | None, "Compare with another run or its output (paired bootstrap)."] = None
    tokenize: Annotated[str | None, "BLEU tokenizer: 13a, none, zh, char, ... (default: the run's setting)."] = None
    lowercase: Annotated[bool | None, "Ignore case in BLEU and chrF (default: the run's setting)."] = None
    output: Annotated[Path | None, "Write the translations to FILE."] = None
    decoding: DecodingOptions = field(default_factory=DecodingOptions)
    batch_tokens: BatchTokens = None
    precision: Annotated[
        str | None,
        "Precision: float32, bfloat16, or on CPUs int8 or float32-fast (for CPUs with AMX) (default: float32).",
    ] = None
    measure_precisions: Annotated[
        bool, "Also compute BLEU and speed of RUN with each precision, with the run's search and scoring settings."
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEvaluation:
    """Options of the evaluation of a language model."""

    text: PlainText
    stride: Annotated[int | None, "New tokens per row; fewer give more context (default: rows do not overlap).", 1] = (
        None
    )
    memory: Annotated[int | None, "Tokens that a model with a memory remembers (default: the run's setting).", 0] = None
    batch_tokens: BatchTokens = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedTextEvaluation:
    """Options of the evaluation of a masked language model."""

    text: PlainText
    batch_tokens: BatchTokens = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelEvaluation:
    """Options of the evaluation of a classifier."""

    labels: Annotated[Path, "Labelled text: label<TAB>text lines."]


EVALUATION_OPTIONS: dict[str, type[Any]] = {
    "translation": TranslationEvaluation,
    "causal": TextEvaluation,
    "masked": MaskedTextEvaluation,
    "classification": LabelEvaluation,
}
"""By task. Models of other tasks cannot be evaluated."""
