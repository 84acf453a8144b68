"""BLEU and speed of the precisions of the native library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from transduce.decoding.native_library import instruction_set
from transduce.decoding.native_model import PRECISIONS
from transduce.decoding.translator import Translator
from transduce.evaluation.metrics import Precisions
from transduce.evaluation.speed import measure_in_turns
from transduce.evaluation.translations import score_translator
from transduce.logging import Log
from transduce.runs.folder import RunFolder

N_TIMED = 256  # sentences in a round of the measurement of speed


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
