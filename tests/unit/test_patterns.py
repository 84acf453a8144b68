"""Every regular expression of the package takes linear time on any text."""

from __future__ import annotations

import importlib
import pkgutil
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

import transduce

SIZE = 1 << 18
UNITS = " \t\n\ra1<&.-'_\"(%\u00c3\u4e00"
WORST = [*(("", unit) for unit in (*UNITS, "<a", "<a ", "&#1")), ("<", "a"), ("</a", " "), ("&#", "1"), (">>", "a")]
"""A beginning and what is repeated behind it: almost a match, everywhere."""


def patterns() -> Iterator[tuple[str, re.Pattern[Any]]]:
    """The compiled patterns among the global names of all modules, inside containers too."""
    for module in pkgutil.walk_packages(transduce.__path__, "transduce."):
        if module.name.endswith("__main__"):
            continue
        try:
            names = vars(importlib.import_module(module.name))
        except ImportError:  # an optional dependency is missing
            continue
        for name, value in list(names.items()):
            for pattern in inside(value):
                yield f"{module.name}.{name}: {pattern.pattern!r}", pattern


def inside(value: object) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict):
        yield from inside(tuple(value.values()))
    elif isinstance(value, list | tuple | set | frozenset):
        for one in value:
            yield from inside(one)


FOUND = sorted({pattern: name for name, pattern in patterns()}.items(), key=lambda found: found[1])


def test_patterns_are_found() -> None:
    assert len(FOUND) > 10


@pytest.mark.skipif(not hasattr(signal, "SIGVTALRM"), reason="needs a timer of CPU time")
@pytest.mark.parametrize("pattern", [pattern for pattern, _ in FOUND], ids=[name for _, name in FOUND])
def test_pattern_takes_linear_time(pattern: re.Pattern[Any]) -> None:
    """Five seconds of CPU time for each text; a quadratic pattern takes a minute or more."""

    def fail(*_: object) -> None:
        raise TimeoutError("the pattern takes too long")

    before = signal.signal(signal.SIGVTALRM, fail)
    try:
        for begin, unit in WORST:
            text = begin + (unit * (SIZE // len(unit) + 1))[:SIZE]
            subject = text.encode() if isinstance(pattern.pattern, bytes) else text
            signal.setitimer(signal.ITIMER_VIRTUAL, 5)
            for _ in pattern.finditer(subject):
                pass
            pattern.match(subject)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
