"""The checks of a sample. Each is a pure function of the sample.

To add one: write the function, add a row to CHECKS, and test it with a corpus that has the fault and one that has not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transduce.doctor import pair_checks, text_checks
from transduce.doctor.findings import Finding
from transduce.doctor.sampling import Sample
from transduce.tasks.base import Form

ALL: tuple[Form, ...] = ("pairs", "text", "labelled")


@dataclass(frozen=True, slots=True)
class Check:
    """A check, and the forms of data that it applies to. `quick`: every training runs it on a small sample."""

    name: str
    forms: tuple[Form, ...]
    run: Callable[[Sample], Iterator[Finding]]
    quick: bool = False


CHECKS: tuple[Check, ...] = (
    Check("readable", ALL, text_checks.readable),
    Check("lines", ("pairs",), pair_checks.line_counts),
    Check("alignment", ("pairs",), pair_checks.alignment, quick=True),
    Check("languages", ("pairs",), pair_checks.languages, quick=True),
    Check("copies", ("pairs",), pair_checks.copies, quick=True),
    Check("empty", ("pairs",), pair_checks.empty_sides),
    Check("ratios", ("pairs",), pair_checks.ratios),
    Check("characters", ALL, text_checks.characters, quick=True),
    Check("duplicates", ALL, text_checks.duplicates),
    Check("leaks", ALL, text_checks.leaks),
    Check("labels", ("labelled",), text_checks.labels),
    Check("documents", ("text",), text_checks.documents),
)


def run_checks(sample: Sample, *, quick: bool = False) -> list[Finding]:
    """The findings of all checks that apply to the sample."""
    checks = [check for check in CHECKS if sample.form in check.forms and (check.quick or not quick)]
    return [finding for check in checks for finding in check.run(sample)]
