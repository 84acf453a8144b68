"""Rows of running text: every token once per epoch, cut differently in each, the same for the same seed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from transduce.data.batching import offset_of, plan_rows, row_end, row_starts


@given(
    n_tokens=st.integers(0, 200),
    context=st.integers(1, 40),
    n_rows=st.integers(1, 9),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 50),
)
def test_rows_are_contiguous_and_contain_every_target_once(
    n_tokens: int, context: int, n_rows: int, seed: int, epoch: int
) -> None:
    offset = offset_of(context, seed=seed, epoch=epoch)
    batches = plan_rows(n_tokens, context=context, n_rows=n_rows, seed=seed, epoch=epoch)
    spans = [
        (int(start), row_end(int(start), n_tokens, context=context, offset=offset))
        for batch in batches
        for start in batch
    ]
    assert all(0 < end - start <= context for start, end in spans)
    targets = sorted(i for start, end in spans for i in range(start, end))
    assert targets == list(range(1, n_tokens))
    assert sum(end - start < context for start, end in spans) <= 2, "only the first and the last may be short"
    sizes = [len(batch) for batch in batches]
    assert all(0 < size <= n_rows for size in sizes) and (not sizes or max(sizes) - min(sizes) <= 1)


def test_cuts_and_order_differ_between_epochs() -> None:
    size = {"context": 16, "n_rows": 4}
    epochs = [np.concatenate(plan_rows(1000, seed=3, epoch=epoch, **size)) for epoch in range(20)]
    again = [np.concatenate(plan_rows(1000, seed=3, epoch=epoch, **size)) for epoch in range(20)]
    assert all(map(np.array_equal, epochs, again))
    assert len({int(starts.max()) % 16 for starts in epochs}) > 5
    assert all(not np.array_equal(one, np.sort(one)) for one in epochs)
    assert all(not np.array_equal(one, two) for one, two in pairwise(epochs))


def test_rows_in_order_begin_at_the_start() -> None:
    assert row_starts(10, context=4, offset=0).tolist() == [1, 5, 9]
    assert row_starts(10, context=4, offset=3).tolist() == [1, 4, 8]
    assert row_starts(1, context=4, offset=3).tolist() == []
