"""Translate held-out text and score the translations."""

from __future__ import annotations

from collections.abc import Sequence

from transduce.config.settings import EvaluationSettings
from transduce.decoding.options import TranslationOptions
from transduce.decoding.translator import Translator
from transduce.evaluation.metrics import Scores, evaluate

_DEFAULT = TranslationOptions()


def score_translator(
    translator: Translator,
    pairs: Sequence[tuple[str, str]],
    scoring: EvaluationSettings,
    options: TranslationOptions = _DEFAULT,
) -> tuple[Scores, list[str]]:
    """Translate the sources of (source, reference) pairs; returns the scores of the translations, and these."""
    hypotheses = [found.text for found in translator.translate([src for src, _ in pairs], options)]
    references = [reference for _, reference in pairs]
    return evaluate(hypotheses, references, tokenize=scoring.tokenize, lowercase=scoring.lowercase), hypotheses
