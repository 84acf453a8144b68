"""What a finished encoder does: fill gaps, tell labels, be judged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from transduce.data.labelled import number_of, read_labelled
from transduce.data.lines import read_lines
from transduce.decoding.classifier import TextClassifier
from transduce.decoding.mask_filler import Filler
from transduce.errors import DataError
from transduce.evaluation.classification import score_labels
from transduce.logging import Log

STDIN = Path("-")
_CHUNK = 1000  # texts classified before the first is printed


def fill(run: Path, texts: Sequence[str] | None, *, top: int, device: str, as_json: bool) -> Iterator[str]:
    """Lines of what a run fills gaps with; texts from stdin where none are given."""
    filler = Filler.load(run, device=device)
    for one in filler.fill(list(read_lines(STDIN)) if texts is None else texts, top=top):
        if as_json:
            yield _line(asdict(one))
            continue
        for number, gap in enumerate(one.gaps, 1):
            if len(one.gaps) > 1:
                yield f"gap {number}:"
            yield from (f"{found.probability:6.1%}  {found.token}\t{found.text}" for found in gap)


def classify(run: Path, file: Path | str, *, device: str, as_json: bool) -> Iterator[str]:
    """LABEL<TAB>PROBABILITY for each line of text, which may be a pair: text<TAB>text."""
    classifier = TextClassifier.load(run, device=device)
    lines, n_full = read_lines(file), 0
    while chunk := list(islice(lines, _CHUNK)):
        for one in classifier.classify([tuple(line.split("\t")) for line in chunk]):
            n_full += one.full
            yield _line(asdict(one)) if as_json else f"{one.label}\t{one.probability:.4f}"
    if n_full:
        log = Log(quiet=True)
        log.warn(f"{n_full:,} texts fill or exceed the {classifier.longest} tokens that the model reads; cut there")


def evaluate_labels(run: Path, file: Path, *, device: str, as_json: bool) -> Iterator[str]:
    """Lines that tell how well a run tells the labels of a file."""
    classifier = TextClassifier.load(run, device=device)
    examples = list(read_labelled(file))
    if not examples:
        raise DataError(f"{file}: there is no text")
    truth = [number_of(example, classifier.labels) for example in examples]
    told = [classifier.labels.index(one.label) for one in classifier.classify([e.texts for e in examples])]
    scores = score_labels(truth, told, classifier.labels)
    yield from [_line(scores.to_json())] if as_json else scores.lines()


def evaluate_gaps(run: Path, text: Path, *, batch_tokens: int | None, device: str, as_json: bool) -> Iterator[str]:
    """Lines that tell how well a run tells the hidden words of a text (`-`: stdin)."""
    score = Filler.load(run, device=device).evaluate(text, batch_tokens=batch_tokens)
    yield from [_line(score.to_json())] if as_json else score.lines()


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
