"""The parts of the oracle compared with PyTorch in float64. The whole: both equal our model in tests/unit/models."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from oracle import numpy_transformer as oracle

EXACT = {"rtol": 1e-10, "atol": 1e-12}  # two float64 implementations


def rand(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def to_torch(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(x))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("relu", functional.relu),
        ("gelu", functional.gelu),
        ("gelu_tanh", lambda x: functional.gelu(x, approximate="tanh")),
        ("silu", functional.silu),
    ],
    ids=["relu", "gelu", "gelu_tanh", "silu"],
)
def test_activations(ours: str, theirs) -> None:
    x = np.concatenate([rand(100) * 3, [0.0, -800.0, 800.0]])
    np.testing.assert_allclose(oracle.ACTIVATIONS[ours](x), theirs(to_torch(x)).numpy(), **EXACT)


def test_norms() -> None:
    x, weight, bias = rand(5, 12), rand(12, seed=1), rand(12, seed=2)
    theirs = functional.layer_norm(to_torch(x), (12,), to_torch(weight), to_torch(bias), 1e-5)
    np.testing.assert_allclose(oracle.layer_norm(x, weight, bias, 1e-5), theirs.numpy(), **EXACT)
    theirs = functional.rms_norm(to_torch(x), (12,), to_torch(weight), 1e-5)
    np.testing.assert_allclose(oracle.rms_norm(x, weight, 0.0, 1e-5), theirs.numpy(), **EXACT)


def test_attention() -> None:
    query, key, value = rand(4, 6), rand(7, 6, seed=1), rand(7, 3, seed=2)
    allowed = np.random.default_rng(3).random((4, 7)) < 0.6
    allowed[:, 0] = True
    ours, weights = oracle.attention(query, key, value, allowed)
    theirs = functional.scaled_dot_product_attention(*map(to_torch, (query, key, value)), attn_mask=to_torch(allowed))
    np.testing.assert_allclose(ours, theirs.numpy(), **EXACT)
    np.testing.assert_allclose(weights.sum(-1), np.ones(4), **EXACT)
    assert not weights[~allowed].any()


def test_attention_of_a_row_that_sees_nothing_is_even() -> None:
    value = rand(2, 4, seed=2)
    allowed = np.array([[False, True], [False, False]])
    output, weights = oracle.attention(rand(2, 4), rand(2, 4, seed=1), value, allowed)
    np.testing.assert_allclose(weights, [[0, 1], [0.5, 0.5]])
    np.testing.assert_allclose(output, [value[1], value.mean(0)], **EXACT)


def test_sinusoid_by_hand() -> None:
    table = oracle.sinusoid(3, 4)
    np.testing.assert_allclose(table[0], [0, 1, 0, 1])
    np.testing.assert_allclose(table[2], [np.sin(2), np.cos(2), np.sin(2 / 100), np.cos(2 / 100)])


def test_rotation_keeps_lengths_and_sees_only_distances() -> None:
    query, key = rand(1, 8), rand(1, 8, seed=1)
    queries, keys = oracle.rotate(np.repeat(query, 9, 0)), oracle.rotate(np.repeat(key, 9, 0))
    np.testing.assert_allclose((queries**2).sum(-1), np.full(9, (query**2).sum()), **EXACT)
    scores = queries @ keys.T
    for distance in range(9):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, np.full_like(diagonal, diagonal[0]), **EXACT)


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5])
def test_convolution(kernel: int) -> None:
    x, weight, bias = rand(6, 5), rand(7, 5, kernel, seed=1), rand(7, seed=2)
    weights = {"c.weight": weight, "c.bias": bias}
    for causal in (False, True):
        left = kernel - 1 if causal else (kernel - 1) // 2
        padded = functional.pad(to_torch(x).T[None], (left, kernel - 1 - left))
        theirs = functional.conv1d(padded, to_torch(weight), to_torch(bias))[0].T
        np.testing.assert_allclose(oracle.convolve(x, weights, "c", causal=causal), theirs.numpy(), **EXACT)


def test_label_smoothing() -> None:
    logits, gold = rand(6, 9) * 4, np.array([0, 8, 3, 3, 1, 5])
    leaf = to_torch(logits).requires_grad_()
    loss, nll = oracle.label_smoothed(logits, gold, 0.1)
    theirs = functional.cross_entropy(leaf, to_torch(gold), reduction="sum", label_smoothing=0.1)
    theirs.backward()
    np.testing.assert_allclose(loss, theirs.item(), **EXACT)
    np.testing.assert_allclose(
        nll, functional.cross_entropy(to_torch(logits), to_torch(gold), reduction="sum").item(), **EXACT
    )
    np.testing.assert_allclose(oracle.label_smoothed_gradient(logits, gold, 0.1), leaf.grad.numpy(), **EXACT)
