"""Scores of a trained model on files: translations, alone or compared with another system, and labels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest

from transduce.data.corpus import number_of, read_labelled
from transduce.data.lines import read_lines, read_parallel
from transduce.decoding.classifier import TextClassifier
from transduce.errors import DataError, UserError
from transduce.evaluation.bootstrap import is_significant
from transduce.evaluation.metrics import LabelScores, Scores, check_lengths, evaluate, metrics, score_labels
from transduce.evaluation.precisions import format_precisions
from transduce.runs.atomic import write_text
from transduce.runs.folder import RunFolder


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of two systems on the same sentences. Intervals contain 95 % of the resampled corpora."""

    metric: str
    value: float
    other: float
    margin: float  # half the width of the interval of `value`
    other_margin: float
    difference: float  # value - other
    interval: tuple[float, float]  # of the difference
    p_value: float  # probability of such a difference between equal systems
    signature: str

    @property
    def verdict(self) -> str:
        """Result in words. Of TER, lower is better."""
        if not is_significant(self.p_value, self.interval):
            return "no significant difference"
        return "better" if (self.difference < 0) == (self.metric == "TER") else "worse"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"verdict": self.verdict}

    def line(self) -> str:
        """Format for people."""
        low, high = self.interval
        ours, theirs = f"{self.value:6.2f} ± {self.margin:.2f}", f"{self.other:6.2f} ± {self.other_margin:.2f}"
        by = f"{self.difference:+.2f} [{low:+.2f}, {high:+.2f}]"
        return f"{self.metric:5} {ours}  against {theirs}  difference {by}  p = {self.p_value:.4f}  {self.verdict}"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of one system, and its comparison with another one if there is any.

    `precision`: of the translation; empty if the translations were given. `precisions`: BLEU by precision, if measured.
    """

    scores: Scores
    against: Path | None = None
    comparison: Sequence[Comparison] = ()
    precision: str = ""
    precisions: Mapping[str, float] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Format for people."""
        head = [f"against {self.against}, paired bootstrap:"] if self.comparison else []
        lines = [*self.scores.lines(), *([f"precision {self.precision}"] if self.precision else [])]
        lines += [format_precisions(self.precisions)] if self.precisions else []
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
    """
    settings = RunFolder.open(run).settings
    scoring, reads_vectors = settings.evaluation, settings.model.reads_vectors
    tokenize = tokenize or scoring.tokenize
    lowercase = scoring.lowercase if lowercase is None else lowercase
    metrics(tokenize, lowercase)  # refuses an unknown tokenizer before anything is translated
    sources, references = read_parallel(*files, names=reads_vectors)
    if against is not None and not against.is_dir():
        check_lengths(list(read_lines(against)), references, f"lines of {against}")

    def output_of(system: Path) -> list[str]:
        if not system.is_dir():
            return list(read_lines(system))
        if RunFolder.open(system).settings.model.reads_vectors != reads_vectors:
            raise DataError(f"one of {run} and {system} reads text and the other vectors; compare runs with one source")
        return translate(system, sources)

    ours = output_of(hypotheses or run)
    scores = evaluate(ours, references, tokenize=tokenize, lowercase=lowercase)
    if output is not None:
        write_text(output, "".join(f"{line}\n" for line in ours))
    if against is None:
        return Evaluation(scores)
    theirs = output_of(against)
    check_lengths(theirs, references, f"lines of {against}")
    rows = paired_bootstrap(ours, theirs, references, tokenize=tokenize, lowercase=lowercase)
    return Evaluation(scores, against, rows)


def evaluate_labels(classifier: TextClassifier, file: Path) -> LabelScores:
    """Score a classifier on a file of labelled texts."""
    examples = list(read_labelled(file, names=classifier.vocabulary.reads_vectors))
    if not examples:
        raise DataError(f"{file}: there is no text")
    truth = [number_of(example, classifier.labels) for example in examples]
    predicted = [classifier.labels.index(one.label) for one in classifier.classify([e.texts for e in examples])]
    return score_labels(truth, predicted, classifier.labels)


def paired_bootstrap(
    hypotheses: Sequence[str],
    others: Sequence[str],
    references: Sequence[str],
    *,
    tokenize: str = "13a",
    lowercase: bool = False,
    n_samples: int = 1000,
    names: Collection[str] = ("BLEU", "chrF", "TER"),
) -> list[Comparison]:
    """Compare `hypotheses` with `others` of another system: BLEU, chrF and TER, each with p-value and intervals.

    Paired bootstrap resampling (Koehn 2004) by sacreBLEU. Raises `DataError` if the three differ in length or are
    empty, `UserError` for an unknown tokenizer or no samples.
    """
    if n_samples < 1:
        raise UserError(f"n_samples = {n_samples}: must be at least 1; 1000 is usual")
    check_lengths(hypotheses, references)
    check_lengths(others, references, "hypotheses of the other system")
    found = []
    for name in names:
        metric = metrics(tokenize, lowercase)[name]
        # sacreBLEU takes the first system as the baseline.
        systems: list[tuple[str, Sequence[str]]] = [("other", list(others)), ("this", list(hypotheses))]
        test = PairedTest(systems, {name: metric}, [list(references)], test_type="bs", n_samples=n_samples)
        signatures, results = test()
        ((key, signature),) = signatures.items()
        rows: Any = results[key]  # a list, against its annotation
        other, this = rows
        comparison = Comparison(
            metric=name,
            value=float(this.score),
            other=float(other.score),
            margin=float(this.ci),
            other_margin=float(other.ci),
            difference=float(this.score - other.score),
            interval=_interval(metric, hypotheses, others, references, n_samples=n_samples, seed=test._seed),
            # sacreBLEU gives identical systems the smallest p there is, 1 / (n_samples + 1).
            p_value=1.0 if this.score == other.score else float(this.p_value),
            signature=str(signature),
        )
        found.append(comparison)
    return found


def _interval(
    metric: Metric,
    hypotheses: Sequence[str],
    others: Sequence[str],
    references: Sequence[str],
    *,
    n_samples: int,
    seed: int | None,
) -> tuple[float, float]:
    """The 2.5th and 97.5th percentile of the difference, over the same draws as sacreBLEU's test."""
    n = len(references)
    draws = np.random.default_rng(seed).choice(n, size=(n_samples, n), replace=True)

    def scores(system: Sequence[str]) -> np.ndarray:
        extracted = metric._extract_corpus_statistics(list(system), [list(references)])
        statistics = np.array(extracted, dtype=np.float64)
        return np.array([metric._compute_score_from_stats(statistics[draw].sum(0)).score for draw in draws])

    low, high = np.percentile(scores(hypotheses) - scores(others), [2.5, 97.5])
    return float(low), float(high)
