"""Translate held-out text and score the translations, also with each precision of the native library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from transduce.config.decoding import DecodingOptions
from transduce.config.settings import EvaluationSettings
from transduce.decoding.native_library import instruction_set
from transduce.decoding.native_model import PRECISIONS
from transduce.decoding.translator import Translator
from transduce.evaluation.metrics import Scores, evaluate
from transduce.evaluation.speed import measure_in_turns
from transduce.logging import Log
from transduce.runs.folder import RunFolder

N_TIMED = 256  # sentences in a round of the measurement of speed
_DEFAULT = DecodingOptions()

Precisions = Mapping[str, Mapping[str, float]]
"""By precision, float32 first: bleu, sentences_per_second."""


def score_translator(
    translator: Translator,
    pairs: Sequence[tuple[str, str]],
    scoring: EvaluationSettings,
    options: DecodingOptions = _DEFAULT,
) -> tuple[Scores, list[str]]:
    """Translate the sources of (source, reference) pairs; returns the scores of the translations, and these."""
    hypotheses = [found.text for found in translator.translate([src for src, _ in pairs], options)]
    references = [reference for _, reference in pairs]
    return evaluate(hypotheses, references, tokenize=scoring.tokenize, lowercase=scoring.lowercase), hypotheses


def measure_precisions(folder: RunFolder, pairs: Sequence[tuple[str, str]], log: Log) -> Precisions | str:
    """Translate (source, reference) pairs with each precision that this CPU has.

    Search and BLEU are those of the run's settings. Without the native library nothing is measured; returns the reason.
    """
    sources = [src for src, _ in pairs]
    bleu: dict[str, float] = {}
    timed: dict[str, Callable[[int], int]] = {}

    def translate(translator: Translator, n: int) -> int:
        return len(translator.translate(sources[:n]))

    for precision in PRECISIONS:
        if precision == "float32-fast" and instruction_set() != "amx":
            continue  # it is float32
        translator = Translator.load(folder.path, device="cpu", precision=precision)
        if translator.choice.slow_because:
            return translator.choice.slow_because
        bleu[precision] = score_translator(translator, pairs, folder.settings.evaluation)[0].bleu.value
        timed[precision] = partial(translate, translator)
    speeds = measure_in_turns(timed, N_TIMED, log)
    return {name: {"bleu": bleu[name], "sentences_per_second": speeds[name]} for name in timed}


def compare_with_float32(found: Precisions) -> list[tuple[str, float, float, float, float]]:
    """Of each precision: name, BLEU, difference of BLEU, sentences per second, times as fast."""
    bleu, speed = found["float32"]["bleu"], found["float32"]["sentences_per_second"]
    return [
        (name, one["bleu"], one["bleu"] - bleu, one["sentences_per_second"], one["sentences_per_second"] / speed)
        for name, one in found.items()
    ]


def format_precisions(found: Precisions) -> list[str]:
    """Format the other precisions compared with float32, as lines."""
    return [
        f"precision {name}: {bleu:.2f} BLEU ({difference:+.2f}), {times:.1f} times as fast as float32"
        for name, bleu, difference, _, times in compare_with_float32(found)
        if name != "float32"
    ]
