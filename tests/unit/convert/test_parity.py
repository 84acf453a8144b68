"""Comparison of exported models with ours."""

from __future__ import annotations

import math

import pytest
import torch

from transduce.convert.parity import compare, settle
from transduce.convert.weight_map import NEVER
from transduce.errors import TransduceError


def test_ruled_out_logits_need_only_be_ruled_out() -> None:
    ours = torch.tensor([1.0, -40.0, NEVER, NEVER + 3])
    assert compare([(torch.tensor([1.5, -40.0, NEVER * 2, NEVER]), ours)]) == (0.5, 40.0)
    assert compare([(torch.tensor([1.0, -40.0, 0.0, NEVER]), ours)])[0] == math.inf
    bad = torch.tensor([math.nan, -40.0, NEVER, NEVER])
    assert compare([(ours, ours), (bad, ours), (ours, ours)]) == (math.inf, 40.0)


def test_comparing_nothing_fails() -> None:
    with pytest.raises(AssertionError, match="nothing was compared"):
        compare([])


def test_the_bound_grows_with_large_logits_only() -> None:
    assert settle("x", (0.9e-4, 30.0)).endswith("largest difference 9.0e-05 (bound 1e-04)")
    assert settle("x", (2.9e-4, 96.0)).endswith("largest difference 2.9e-04 (bound 3e-04)")
    for difference, size in ((1.1e-4, 10.0), (3.1e-4, 96.0), (math.inf, 0.0), (math.nan, 0.0)):
        with pytest.raises(TransduceError, match="not the same"):
            settle("x", (difference, size))
