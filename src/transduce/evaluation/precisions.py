"""BLEU of the precisions of the native library, measured once for `--precision auto`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transduce.decoding.native_model import PRECISIONS
from transduce.decoding.precision import RECORD, model_digest
from transduce.decoding.translator import Translator
from transduce.errors import DataError, SettingsError
from transduce.evaluation.translations import score_translator
from transduce.runs.folder import RunFolder


def check_measurable(folder: RunFolder, pairs: Sequence[tuple[str, str]]) -> None:
    """Raise `UserError` if `measure_precisions` cannot measure anything: no library for this model, or no text."""
    if because := Translator.load(folder.path, device="cpu").choice.slow_because:
        raise SettingsError(f"measuring precisions needs the native library: {because}")
    if not any(src.strip() and tgt.strip() for src, tgt in pairs):
        raise DataError("there is nothing to measure precisions on: no source with text has a reference with text")


def measure_precisions(folder: RunFolder, pairs: Sequence[tuple[str, str]]) -> Mapping[str, float] | str:
    """Translate (source, reference) pairs with each precision and store BLEU; returns it by precision.

    Search and BLEU are those of the run's settings. Without the native library nothing is measured; returns the reason.
    The folder must be locked.
    """
    scoring, search = folder.settings.evaluation, folder.settings.decoding
    bleu: dict[str, float] = {}
    for precision in PRECISIONS:
        translator = Translator.load(folder.path, device="cpu", precision=precision)
        if translator.choice.slow_because:
            return translator.choice.slow_because
        bleu[precision] = score_translator(translator, pairs, scoring)[0].bleu.value
    model = {"model": model_digest(folder), "sentences": len(pairs)}
    folder.write_record(RECORD, {**model, "beam": search.beam, "length_penalty": search.length_penalty, "bleu": bleu})
    return bleu


def format_precisions(bleu: Mapping[str, float]) -> str:
    """One line for people."""
    return "BLEU by precision: " + ", ".join(f"{name} {value:.2f}" for name, value in bleu.items())
