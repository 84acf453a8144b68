"""Alignment error rate by its definition (Och and Ney 2003, section 5)."""

from __future__ import annotations

import pytest

from transduce.data.word_links import parse_links
from transduce.evaluation.alignment_error import score_links


def test_possible_links_count_for_precision_only() -> None:
    gold = [parse_links("0-0 1-1 2?1"), parse_links("0?0")]
    found = [parse_links("0-0 2-1 3-3").sure, parse_links("0-0").sure]
    score = score_links(found, gold)
    # A has 4 links, S 2; A & S = {0-0}; A & P = {0-0, 2-1} and {0-0}
    assert score.precision == pytest.approx(3 / 4)
    assert score.recall == pytest.approx(1 / 2)
    assert score.error_rate == pytest.approx(1 - (1 + 3) / (4 + 2))
    assert "33.33%" in score.line()


def test_extremes() -> None:
    gold = [parse_links("0-0 1-1")]
    assert score_links([gold[0].sure], gold).error_rate == 0
    assert score_links([parse_links("0-1").sure], gold).error_rate == 1
    nothing = score_links([[]], [parse_links("")])
    assert (nothing.precision, nothing.recall, nothing.error_rate) == (1, 1, 0)
