"""The types and shapes of all calls into the package are checked in tests: `tests/checks.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError

from transduce.data.batch import Batch
from transduce.nn import pooling
from transduce.nn.masks import attention_bias, is_real

X, IDS = torch.zeros(2, 3, 4), torch.ones(1, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        (is_real, ["a list"]),
        (attention_bias, [X]),  # not bool
        (pooling.mean, [X, torch.ones(2, 5, dtype=torch.bool)]),  # S is 3, then 5
        (Batch, [IDS, IDS.float(), IDS, 3]),
    ],
)
def test_calls_with_wrong_types_or_shapes_fail(function: Any, wrong: list[Any]) -> None:
    with pytest.raises(TypeCheckError):
        function(*wrong)
