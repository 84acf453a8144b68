"""Cells, positions, masks and layers against the equations in NumPy and against smaller models."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from oracle.numpy_transformer import Options, alibi, rotate, seen_by, sinusoid, t5_bucket
from text_runs import make_run
from transduce.inspection.arrays import unpack
from transduce.inspection.inspected_models import open_subject
from transduce.inspection.inspection import inspect_sentence

TEXT = "the cat sat on a mat"
_FEED_FORWARD = {"feed_forward", "feed_forward.expand"}
_CROSS = {f"cross_attention{point}" for point in ("", ".query", ".key", ".value", ".heads", ".scores")}
_SELF = {f"self_attention{point}" for point in ("", ".query", ".key", ".value", ".heads", ".scores")}
_SELF |= {"logits"}
ALL = _SELF | _CROSS | _FEED_FORWARD
PRODUCTS: list[tuple[dict[str, Any], set[str]]] = [
    ({"kind": "transformer"}, ALL),
    ({"kind": "transformer", "n_kv_heads": 1, "positions": "alibi"}, ALL),
    ({"kind": "transformer", "positions": "rotary"}, ALL - {"self_attention.query", "self_attention.key"}),
    ({"kind": "transformer", "positions": "shaw"}, ALL - {"self_attention.heads"}),
    ({"kind": "gpt"}, _SELF | _FEED_FORWARD),
    ({"kind": "transformer-xl"}, _FEED_FORWARD | _SELF - {f"self_attention.{x}" for x in ("query", "key", "value")}),
    ({"kind": "rnn"}, {"logits"}),
]


@pytest.mark.parametrize(("options", "expected"), PRODUCTS)
def test_the_cells_that_have_a_dot_product(options: dict[str, Any], expected: set[str], tmp_path: Any) -> None:
    """Queries and keys that are rotated, outputs with Shaw's vectors, and all cells of an RNN are not only products."""
    found, shown = inspect_sentence(open_subject(make_run(tmp_path / "run", **options)), TEXT), set()
    random = np.random.default_rng(1)
    for part in found.parts:
        for name, value in part.values.items():
            products = [found.cell(name, random.integers(value.shape).tolist()) for _ in range(6)]
            if all(products):
                shown.add(part.kind.kind + name.removeprefix(part.name))
            assert all(products) == any(products), name
    assert shown == expected


def encoder_positions(tmp_path: Any, scheme: str) -> tuple[dict[str, Any], Any]:
    subject = open_subject(make_run(tmp_path / "run", kind="transformer", positions=scheme))
    found = inspect_sentence(subject, TEXT)
    return next(one for one in found.views["positions"] if one["stack"] == "encoder"), subject.model


def test_sinusoids_and_their_dot_products_are_the_equation(tmp_path: Any) -> None:
    view, _ = encoder_positions(tmp_path, "sinusoidal")
    expected = sinusoid(*view["table"]["shape"])
    np.testing.assert_allclose(unpack(view["table"]), expected, atol=1e-3)
    np.testing.assert_allclose(unpack(view["dots"]), expected @ expected.T, rtol=1e-3, atol=5e-3)
    assert view["bias"] is None


def test_learned_positions_are_the_weights(tmp_path: Any) -> None:
    view, model = encoder_positions(tmp_path, "learned")
    n, _ = view["table"]["shape"]
    (weights,) = (value for name, value in model.state_dict().items() if name.startswith("src_embedding.positions"))
    np.testing.assert_allclose(unpack(view["table"]), weights[:n], rtol=1e-3, atol=1e-4)


def test_rotary_positions_turn_a_vector_of_ones(tmp_path: Any) -> None:
    """The two numbers of a pair are half a width apart."""
    view, _ = encoder_positions(tmp_path, "rotary")
    pairs = rotate(np.ones(view["table"]["shape"]))
    expected = np.concatenate([pairs[:, 0::2], pairs[:, 1::2]], 1)
    np.testing.assert_allclose(unpack(view["table"]), expected, atol=1e-3)


def test_biases_of_scores_are_the_equations(tmp_path: Any) -> None:
    view, _ = encoder_positions(tmp_path / "alibi", "alibi")
    n_heads, n, _ = view["bias"]["shape"]
    expected = np.stack([alibi(n, head, n_heads) for head in range(n_heads)])
    np.testing.assert_allclose(unpack(view["bias"]), expected, rtol=1e-3, atol=1e-3)
    assert view["table"] is None
    view, model = encoder_positions(tmp_path / "t5", "t5")
    buckets = [[t5_bucket(t - s, causal=False) for s in range(n)] for t in range(n)]
    (table,) = (value for value in model.src_embedding.positions.state_dict().values())
    expected = table.numpy()[np.array(buckets)].transpose(2, 0, 1)
    np.testing.assert_allclose(unpack(view["bias"]), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("pattern", ["full", "local"])
def test_masks_are_those_of_the_patterns(pattern: str, tmp_path: Any) -> None:
    sizes = {"n_heads": 4, "window": 2 if pattern == "local" else 0}
    patterns = {"encoder": pattern, "decoder": pattern}
    given = {f"{stack}_pattern": one for stack, one in patterns.items()} | sizes
    run = make_run(tmp_path / "run", kind="transformer", **{key: value for key, value in given.items() if value})
    found = inspect_sentence(open_subject(run), TEXT, "a mat on a cat")
    options = Options(n_kv_heads=4, n_encoder_layers=2, n_decoder_layers=2, patterns=patterns, **sizes)
    for view in found.views["masks"]:
        mask, stack = unpack(view["mask"]), view["title"].split()[0]
        is_cross = "cross" in view["title"]
        expected = np.ones(mask.shape) if is_cross else seen_by(len(mask), options, stack, 0)[0]
        np.testing.assert_array_equal(mask, expected)
    assert {view["title"] for view in found.views["masks"]} >= {"decoder self-attention"}


@pytest.mark.parametrize(
    "options", [{}, {"residual": "pre", "norm": "rms"}, {"kind": "gpt"}, {"kind": "bert"}], ids=str
)
def test_the_lens_of_a_layer_is_a_model_without_the_later_layers(options: dict[str, Any], tmp_path: Any) -> None:
    """In float64."""
    subject = open_subject(make_run(tmp_path / "run", **({"kind": "transformer"} | options)))
    found = inspect_sentence(subject, TEXT)
    layers = found.views["lens"]["layers"]
    for n, shown in enumerate(layers):
        short = copy.deepcopy(subject.model).double()
        stack = getattr(short, subject.stack)
        stack.blocks = stack.blocks[:n]
        with torch.no_grad():
            logits = subject.logits(short, subject.hidden(short, *found.sentence.inputs))[0]
        expected = logits.softmax(-1)
        rows = torch.arange(len(expected))
        np.testing.assert_allclose(
            unpack(shown["probability"]), expected[rows, found.sentence.targets], rtol=2e-3, atol=1e-5
        )
        assert [p for _, p in shown["top"][0]] == pytest.approx(expected[0].topk(5).values.tolist(), rel=1e-3)
    assert len(layers) >= 2


def test_what_a_part_does_is_shown_as_a_change_of_the_log_probability(tmp_path: Any) -> None:
    subject = open_subject(make_run(tmp_path / "run", kind="transformer"))
    off = ["encoder.blocks.0.feed_forward"]
    whole, without = inspect_sentence(subject, TEXT, "a mat"), inspect_sentence(subject, TEXT, "a mat", off=off)
    log_prob = sum(np.log(token["probability"]) for token in whole.views["tokens"])
    assert without.views["original"] == {"text": "a mat", "log_prob": pytest.approx(log_prob, abs=1e-4)}
