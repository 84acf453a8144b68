"""The examples in docstrings run and give what they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
FILES = sorted(path for path in SRC.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples_run(path: Path) -> None:
    module = importlib.import_module(".".join(path.relative_to(SRC).with_suffix("").parts))
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    n_examples = sum(len(found.examples) for found in doctest.DocTestFinder().find(module))  # skipped ones too
    assert n_examples > 0, "the examples were not found"
    assert failed == 0, "see the differences above"
