"""Scores of a trained model on files: translations, alone or compared with another system, and labels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from sacrebleu.metrics.base import Metric

from transduce.data.corpus import number_of, read_labelled
from transduce.data.lines import read_lines, read_parallel
from transduce.decoding.classifier import TextClassifier
from transduce.errors import DataError, UserError
from transduce.evaluation.bootstrap import N_SAMPLES, SEED, Difference, paired_bootstrap
from transduce.evaluation.metrics import (
    LabelScores,
    Precisions,
    Scores,
    check_lengths,
    evaluate,
    format_precisions,
    metrics,
    score_labels,
)
from transduce.evaluation.precisions import measure_precisions
from transduce.logging import Log
from transduce.runs.atomic import write_text
from transduce.runs.folder import RunFolder


@dataclass(frozen=True, slots=True)
class Comparison:
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
    comparison: Sequence[Comparison] = ()
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


def evaluate_translations(
    run: Path,
    files: tuple[Path, Path],
    *,
    translate: Callable[[Path, Sequence[str]], list[str]],
    hypotheses: Path | None = None,
    against: Path | None = None,
    tokenize: str | None = None,
    lowercase: bool | None = None,
    output: Path | None = None,
    with_precisions: bool = False,
) -> Evaluation:
    """Score a run, or the translations in `hypotheses`, on (source, reference) files.

    Args:
        run: Run folder; its settings give the default of `tokenize` and `lowercase`.
        files: Source and reference file.
        translate: Function from (run folder, source lines) to translations.
        hypotheses: File with translations to score instead of those of the run.
        against: Another run folder, or a file with its translations; adds a paired bootstrap test.
        tokenize: BLEU tokenizer.
        lowercase: Whether BLEU and chrF ignore case.
        output: File to write the scored translations to.
        with_precisions: Whether to measure BLEU and speed of the run with each precision of the native library.
    """
    folder = RunFolder.open(run)
    settings = folder.settings
    scoring, reads_vectors = settings.evaluation, settings.model.reads_vectors
    tokenize = tokenize or scoring.tokenize
    lowercase = scoring.lowercase if lowercase is None else lowercase
    metrics(tokenize, lowercase)  # refuses an unknown tokenizer before anything is translated
    sources, references = read_parallel(*files, names=reads_vectors)
    if with_precisions and not any(map(str.strip, sources)):
        raise DataError(f"{files[0]}: there is no text to measure precisions on; name a file with sentences")
    if against is not None and not against.is_dir():
        check_lengths(list(read_lines(against)), references, f"lines of {against}")

    def output_of(system: Path) -> list[str]:
        if not system.is_dir():
            return list(read_lines(system))
        if RunFolder.open(system).settings.model.reads_vectors != reads_vectors:
            raise DataError(f"one of {run} and {system} reads text and the other vectors; compare runs with one source")
        return translate(system, sources)

    precisions: Precisions = {}
    if with_precisions:
        measured = measure_precisions(folder, list(zip(sources, references, strict=True)), Log())
        if isinstance(measured, str):
            raise UserError(f"precisions are measured with the native library: {measured}")
        precisions = measured
    ours = output_of(hypotheses or run)
    scores = evaluate(ours, references, tokenize=tokenize, lowercase=lowercase)
    if output is not None:
        write_text(output, "".join(f"{line}\n" for line in ours))
    if against is None:
        return Evaluation(scores, precisions=precisions)
    theirs = output_of(against)
    check_lengths(theirs, references, f"lines of {against}")
    rows = compare_translations(ours, theirs, references, tokenize=tokenize, lowercase=lowercase)
    return Evaluation(scores, against, rows, precisions=precisions)


def evaluate_labels(classifier: TextClassifier, file: Path) -> LabelScores:
    """Score a classifier on a file of labelled texts."""
    examples = list(read_labelled(file, names=classifier.vocabulary.reads_vectors))
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
) -> list[Comparison]:
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
        found.append(Comparison(name, score(ours.sum(0)), score(theirs.sum(0)), by, str(signature)))
    return found
