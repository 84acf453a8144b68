"""The padding of batches for CUDA graphs; tests/unit/models/test_gpu.py has the graphs themselves."""

from typing import Any

import numpy as np
import pytest
import torch

from oracle.cases import VOCAB, settings
from transduce.data.batch import TrainingBatch, collate, collate_rows
from transduce.data.store import Example, RowExample
from transduce.models.registry import build_model
from transduce.training.loss import predict_tokens
from transduce.training.step import padded_to_recur


def batch_of(kind: str, lengths: list[tuple[int, int]]) -> TrainingBatch:
    draw = np.random.default_rng(1)
    sides = [[draw.integers(4, VOCAB, n) for n in pair] for pair in lengths]
    if kind == "gpt":
        return collate_rows([RowExample(src, src[::-1]) for src, _ in sides])
    if kind == "vectors":
        return collate([Example(src=draw.normal(size=(len(src), 3)).astype(np.float32), tgt=tgt) for src, tgt in sides])
    return collate([Example(src=src, tgt=tgt) for src, tgt in sides])


@pytest.mark.parametrize("kind", ["transformer", "gpt", "vectors"])
@pytest.mark.parametrize(
    "lengths", [[(1, 1)], [(5, 9), (2, 0), (7, 3)], [(4, 3)] * 34], ids=["one token", "three rows", "34 rows"]
)
def test_padding_changes_neither_sums_nor_gradients(kind: str, lengths: list[tuple[int, int]]) -> None:
    batch = batch_of(kind, lengths)
    options: dict[str, Any] = {
        "transformer": {},
        "gpt": {"kind": "gpt"},
        "vectors": {"source": "vectors", "tie": "two_way"},
    }[kind]
    n_src = 3 if kind == "vectors" else VOCAB  # the width of vectors
    model = build_model(settings(**options), n_src=n_src, n_tgt=VOCAB)
    results = []
    for one in (batch, padded_to_recur(batch, longest=None)):
        model.zero_grad()
        loss, nll, _ = predict_tokens(model, one, smoothing=0.1)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([loss.detach(), nll, *gradients])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


def test_shapes_recur_but_are_no_longer_than_the_model_takes() -> None:
    batches = [batch_of("transformer", [(n_src, n_tgt)] * 33) for n_src in (4, 6, 7) for n_tgt in (4, 5, 6)]
    found = [padded_to_recur(one, longest=None) for one in batches]
    assert {tuple(x.shape for x in (*one.inputs, one.targets)) for one in found} == {((34, 8), (34, 8), (34, 8))}
    limited = padded_to_recur(batches[0], longest=6)
    assert [x.shape[1] for x in (*limited.inputs, limited.targets)] == [6, 6, 6]
