"""Scores of a translator: on files, alone or compared with another system, and with each precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transduce.config.decoding import DecodingOptions
from transduce.config.settings import EvaluationSettings
from transduce.data.lines import read_lines, read_parallel
from transduce.decoding.native_model import PRECISIONS
from transduce.decoding.translator import Translator
from transduce.errors import DataError, SettingsError, UserError
from transduce.evaluation.metrics import Precisions, Scores, check_lengths, evaluate, format_precisions, metrics
from transduce.evaluation.options import TranslationEvaluation
from transduce.evaluation.significance import SystemComparison, compare_translations
from transduce.evaluation.speed import measure_in_turns
from transduce.logging import Log
from transduce.native.library import instruction_set
from transduce.runs.atomic import write_text
from transduce.runs.folder import RunFolder
from transduce.text.tokenizer import load_tokenizers

N_TIMED = 256  # sentences in a round of the measurement of speed
_DEFAULT = DecodingOptions()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of one system, and its comparison with another one if there is any.

    `precision`: of the translation; empty if the translations were given. `precisions`: empty if not measured.
    """

    scores: Scores
    against: Path | None = None
    comparison: Sequence[SystemComparison] = ()
    precision: str = ""
    precisions: Precisions = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Format for people."""
        head = [f"against {self.against}, paired bootstrap:"] if self.comparison else []
        lines = [*self.scores.lines(), *([f"precision {self.precision}"] if self.precision else [])]
        lines += format_precisions(self.precisions) if self.precisions else []
        return [*lines, *head, *(row.line() for row in self.comparison)]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        rows = [row.to_json() for row in self.comparison]
        found = self.scores.to_json() | ({"against": str(self.against), "comparison": rows} if rows else {})
        found |= {"precision": self.precision} if self.precision else {}
        return found | ({"precisions": dict(self.precisions)} if self.precisions else {})


def evaluate_translations(run: Path, options: TranslationEvaluation, *, device: str = "auto") -> Evaluation:
    """Score a run, or given translations, and compare them with those of another system if that is asked for."""
    folder = RunFolder.open(run)
    scoring = folder.settings.evaluation
    tokenize = options.tokenize or scoring.tokenize
    lowercase = scoring.lowercase if options.lowercase is None else options.lowercase
    metrics(tokenize, lowercase)  # refuses an unknown tokenizer before anything is translated
    sources, references = read_parallel(options.src, options.ref, load_tokenizers(folder).src)
    systems = [options.hyp or run, *([options.against] if options.against else [])]
    given = {file: list(read_lines(file)) for file in systems if not file.is_dir()}
    for file, lines in given.items():
        check_lengths(lines, references, f"lines of {file}")
    decoding = _decoding_of(options, [system for system in systems if system not in given])
    precisions: Precisions = {}
    if options.measure_precisions:
        if not any(map(str.strip, sources)):
            raise DataError(f"{options.src}: there is no text to measure precisions on; name a file with sentences")
        measured = measure_precisions(folder, list(zip(sources, references, strict=True)), Log())
        if isinstance(measured, str):
            raise UserError(f"precisions are measured with the native library: {measured}")
        precisions = measured
    used: list[str] = []

    def output_of(system: Path) -> list[str]:
        if system in given:
            return given[system]
        if RunFolder.open(system).settings.model.reads_vectors != folder.settings.model.reads_vectors:
            raise DataError(f"one of {run} and {system} reads text and the other vectors; compare runs with one source")
        precision: Any = options.precision or "float32"  # `load` checks it
        translator = Translator.load(system, device=device, precision=precision)
        used.append(translator.choice.precision)
        return [found.text for found in translator.translate(sources, decoding)]

    ours, *others = map(output_of, systems)
    scores = evaluate(ours, references, tokenize=tokenize, lowercase=lowercase)
    if options.output is not None:
        write_text(options.output, "".join(f"{line}\n" for line in ours))
    rows: Sequence[SystemComparison] = ()
    if others:
        rows = compare_translations(ours, others[0], references, tokenize=tokenize, lowercase=lowercase)
    return Evaluation(scores, options.against, rows, " and ".join(dict.fromkeys(used)), precisions)


def _decoding_of(options: TranslationEvaluation, runs: Sequence[Path]) -> DecodingOptions:
    """Decoding options for the runs. Without a run, refuses options that would have no effect."""
    batch = {} if options.batch_tokens is None else {"batch_tokens": options.batch_tokens}
    decoding = DecodingOptions(**options.decoding.model_dump(exclude_unset=True), **batch)
    if not runs and (unused := [*decoding.model_fields_set, *(["precision"] if options.precision else [])]):
        raise SettingsError(f"{', '.join(unused)}: no effect if hyp gives the translations; leave it out")
    return decoding


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
