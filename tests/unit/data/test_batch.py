"""Collating: padded, shifted, framed; nothing else."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce.data.batch import collate, pad_sources
from transduce.data.store import Example
from transduce.text.tokenizer import BOS, EOS, PAD

sentences = st.lists(st.integers(1, 65_535), max_size=9)


def slow(rows: list[list[int]]) -> list[list[int]]:
    width = max((len(row) for row in rows), default=0)
    return [row + [PAD] * (width - len(row)) for row in rows]


@settings(max_examples=200, deadline=None)
@given(pairs=st.lists(st.tuples(sentences, sentences), min_size=1, max_size=6), as_arrays=st.booleans())
def test_collate_equals_a_simple_implementation(pairs: list[tuple[list[int], list[int]]], as_arrays: bool) -> None:
    give = (lambda ids: np.array(ids, dtype=np.uint16)) if as_arrays else list
    batch = collate([Example(src=give(src), tgt=give(tgt)) for src, tgt in pairs])
    assert batch.src.tolist() == slow([[*src, EOS] for src, _ in pairs])
    assert batch.tgt_in.tolist() == slow([[BOS, *tgt] for _, tgt in pairs])
    assert batch.tgt_out.tolist() == slow([[*tgt, EOS] for _, tgt in pairs])
    assert batch.n_targets == sum(len(tgt) + 1 for _, tgt in pairs) == int((batch.tgt_out != PAD).sum())
    assert {t.dtype for t in (batch.src, batch.tgt_in, batch.tgt_out)} == {torch.int64}
    assert torch.equal(pad_sources([give(src) for src, _ in pairs]), batch.src)


def test_a_batch_is_frozen_and_not_copied_on_the_same_device() -> None:
    batch = collate([Example(src=[5], tgt=[6, 7])])
    assert batch.to("cpu") is batch
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.n_targets = 3  # type: ignore[misc]


def test_empty_sources_are_padded() -> None:
    assert pad_sources([]).shape == (0, 1)
    assert pad_sources([[]]).tolist() == [[EOS]]


def test_a_batch_does_not_share_memory_with_the_store() -> None:
    ids = np.array([5, 6], dtype=np.int64)
    batch = collate([Example(src=ids, tgt=ids)])
    batch.src.zero_()
    assert ids.tolist() == [5, 6]


@pytest.mark.gpu
def test_to_the_gpu_and_back() -> None:
    batch = collate([Example(src=[5, 6], tgt=[7]), Example(src=[5], tgt=[8, 9])])
    sent = batch.to("cuda")
    torch.cuda.synchronize()
    assert sent.src.is_cuda and sent.n_targets == batch.n_targets
    for name in ("src", "tgt_in", "tgt_out"):
        assert torch.equal(getattr(sent, name).cpu(), getattr(batch, name))
