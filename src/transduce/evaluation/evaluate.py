"""Scores of a trained model on files: translations, alone or compared with another system, and labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transduce.data.labelled import number_of, read_labelled
from transduce.data.lines import read_lines
from transduce.decoding.classifier import TextClassifier
from transduce.errors import DataError
from transduce.evaluation.classification import LabelScores, score_labels
from transduce.evaluation.compare import Comparison, paired_bootstrap
from transduce.evaluation.metrics import Scores, check_lengths, evaluate, metrics
from transduce.runs.atomic import write_text
from transduce.runs.folder import RunFolder


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of one system, and its comparison with another one if there is any."""

    scores: Scores
    against: Path | None = None
    comparison: Sequence[Comparison] = ()

    def lines(self) -> list[str]:
        """Format for people."""
        head = [f"against {self.against}, paired bootstrap:"] if self.comparison else []
        return [*self.scores.lines(), *head, *(row.line() for row in self.comparison)]

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        rows = [row.to_json() for row in self.comparison]
        return self.scores.to_json() | ({"against": str(self.against), "comparison": rows} if rows else {})


def read_parallel(src: Path, tgt: Path) -> tuple[list[str], list[str]]:
    """Read two files that are aligned line by line. Raises `DataError` if they differ in length or are empty."""
    sources, targets = list(read_lines(src)), list(read_lines(tgt))
    if len(sources) != len(targets):
        raise DataError(f"{src} has {len(sources):,} lines, {tgt} has {len(targets):,}; they must be aligned")
    if not sources:
        raise DataError(f"{src} is empty")
    return sources, targets


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
    scoring = RunFolder.open(run).settings.evaluation
    tokenize = tokenize or scoring.tokenize
    lowercase = scoring.lowercase if lowercase is None else lowercase
    metrics(tokenize, lowercase)  # refuses an unknown tokenizer before anything is translated
    sources, references = read_parallel(*files)
    if against is not None and not against.is_dir():
        check_lengths(list(read_lines(against)), references, f"lines of {against}")

    def output_of(system: Path) -> list[str]:
        return translate(system, sources) if system.is_dir() else list(read_lines(system))

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
    examples = list(read_labelled(file))
    if not examples:
        raise DataError(f"{file}: there is no text")
    truth = [number_of(example, classifier.labels) for example in examples]
    predicted = [classifier.labels.index(one.label) for one in classifier.classify([e.texts for e in examples])]
    return score_labels(truth, predicted, classifier.labels)
