"""Scores of a trained model on files: translations, alone or compared with another system, and labels."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from sacrebleu.metrics.base import Metric

from transduce.config.decoding import DecodingOptions
from transduce.data.corpus import number_of, read_labelled
from transduce.data.lines import read_lines, read_parallel
from transduce.decoding.classifier import TextClassifier
from transduce.decoding.translator import Translator
from transduce.errors import DataError, SettingsError, UserError
from transduce.evaluation.bootstrap import N_SAMPLES, SEED, Difference, paired_bootstrap
from transduce.evaluation.metrics import (
    LabelScores,
    Scores,
    check_lengths,
    evaluate,
    metrics,
    score_labels,
)
from transduce.evaluation.options import TranslationEvaluation
from transduce.evaluation.translations import Precisions, format_precisions, measure_precisions
from transduce.logging import Log
from transduce.runs.atomic import write_text
from transduce.runs.folder import RunFolder
from transduce.text.tokenizer import load_tokenizers


@dataclass(frozen=True, slots=True)
class SystemComparison:
    """One metric of two systems on the same sentences."""

    metric: str
    value: float
    other: float
    by: Difference
    signature: str

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        own = {"metric": self.metric, "value": self.value, "other": self.other, "signature": self.signature}
        return own | self.by.to_json()

    def line(self) -> str:
        """Format for people."""
        ours, theirs = f"{self.value:6.2f} ± {self.by.margin:.2f}", f"{self.other:6.2f} ± {self.by.other_margin:.2f}"
        found = f"{self.by.format()}  p = {self.by.p_value:.4f}  {self.by.verdict}"
        return f"{self.metric:5} {ours}  against {theirs}  difference {found}"


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
    rows = [
        row
        for theirs in others
        for row in compare_translations(ours, theirs, references, tokenize=tokenize, lowercase=lowercase)
    ]
    return Evaluation(scores, options.against, rows, " and ".join(dict.fromkeys(used)), precisions)


def _decoding_of(options: TranslationEvaluation, runs: Sequence[Path]) -> DecodingOptions:
    """How the runs translate. Without a run, refuses options that would have no effect."""
    batch = {} if options.batch_tokens is None else {"batch_tokens": options.batch_tokens}
    decoding = DecodingOptions(**options.decoding.model_dump(exclude_unset=True), **batch)
    if not runs and (unused := [*decoding.model_fields_set, *(["precision"] if options.precision else [])]):
        raise SettingsError(f"{', '.join(unused)}: no effect if hyp gives the translations; leave it out")
    return decoding


def evaluate_labels(classifier: TextClassifier, file: Path) -> LabelScores:
    """Score a classifier on a file of labelled texts."""
    examples = list(read_labelled(file, classifier.vocabulary))
    if not examples:
        raise DataError(f"{file}: there is no text")
    truth = [number_of(example, classifier.labels) for example in examples]
    predicted = [classifier.labels.index(one.label) for one in classifier.classify([e.texts for e in examples])]
    return score_labels(truth, predicted, classifier.labels)


def compare_translations(
    hypotheses: Sequence[str],
    others: Sequence[str],
    references: Sequence[str],
    *,
    tokenize: str = "13a",
    lowercase: bool = False,
    n_samples: int = N_SAMPLES,
    names: Collection[str] = ("BLEU", "chrF", "TER"),
) -> list[SystemComparison]:
    """Compare `hypotheses` with `others` of another system: BLEU, chrF and TER, each with p-value and intervals.

    Raises `DataError` if the three differ in length or are empty, `UserError` for an unknown tokenizer or no samples.
    """
    if n_samples < 1:
        raise UserError(f"n_samples = {n_samples}: must be at least 1; 1000 is usual")
    check_lengths(hypotheses, references)
    check_lengths(others, references, "hypotheses of the other system")
    found = []
    for name in names:
        metric = metrics(tokenize, lowercase)[name]

        def score(statistics: np.ndarray, metric: Metric = metric) -> float:
            return float(metric._compute_score_from_stats(statistics.tolist()).score)

        ours, theirs = (
            np.array(metric._extract_corpus_statistics(list(system), [list(references)]), dtype=np.float64)
            for system in (hypotheses, others)
        )
        by = paired_bootstrap([ours], [theirs], score, higher_is_better=name != "TER", n_samples=n_samples)
        signature = metric.get_signature()
        signature.update("bs", n_samples)
        signature.update("seed", SEED)
        found.append(SystemComparison(name, score(ours.sum(0)), score(theirs.sum(0)), by, str(signature)))
    return found
