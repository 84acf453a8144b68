"""The CHECKS table: what a sample of the data is looked at for. Each check is a pure function of the sample.

Another check is a function, a line of the table, and two tests: a corpus with the fault, and one without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transduce.doctor import pairs, texts
from transduce.doctor.findings import Finding
from transduce.doctor.sampling import Sample
from transduce.tasks.base import Form

PAIRS: frozenset[Form] = frozenset({"pairs"})
LABELLED: frozenset[Form] = frozenset({"labelled"})
TEXT: frozenset[Form] = frozenset({"text"})
ALL: frozenset[Form] = PAIRS | LABELLED | TEXT


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table. `quick`: done by every training, on a small sample."""

    name: str
    forms: frozenset[Form]
    run: Callable[[Sample], list[Finding]]
    quick: bool = False


CHECKS: tuple[Check, ...] = (
    Check("readable", ALL, texts.readable),
    Check("lines", PAIRS, pairs.line_counts),
    Check("alignment", PAIRS, pairs.alignment, quick=True),
    Check("languages", PAIRS, pairs.languages, quick=True),
    Check("copies", PAIRS, pairs.copies, quick=True),
    Check("empty", PAIRS, pairs.empty_sides),
    Check("ratios", PAIRS, pairs.ratios),
    Check("characters", ALL, texts.characters, quick=True),
    Check("duplicates", ALL, texts.duplicates),
    Check("leaks", ALL, texts.leaks),
    Check("labels", LABELLED, texts.labels),
    Check("documents", TEXT, texts.documents),
)


def run_checks(sample: Sample, *, quick: bool = False) -> list[Finding]:
    """What all checks that apply have to say."""
    found: list[Finding] = []
    for check in CHECKS:
        if sample.form in check.forms and (check.quick or not quick):
            found += check.run(sample)
    return found
