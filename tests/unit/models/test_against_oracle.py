"""The whole model compared with the NumPy oracle: every option, random combinations, forward and gradients."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn

from oracle import numpy_transformer as oracle
from oracle.adapter import numpy_weights, options_of
from oracle.cases import FLOAT64, MIXED, SINGLE, make, pad, sentences
from oracle.differences import assert_gradients
from transduce.config.model import ModelSettings

EVERY = SINGLE | MIXED
SRC_LENGTHS, TGT_LENGTHS = (5, 1, 12, 3), (4, 12, 1, 6)  # one token and the longest, on both sides
FLOAT32 = 2e-5  # of the largest logit; weights of 0.3 and five blocks amplify the rounding of 6e-8


def oracle_logits(
    model: nn.Module, settings: ModelSettings, srcs: list[Tensor], tgts: list[Tensor], firsts: list[int] | None = None
) -> list[oracle.Array]:
    weights, options = numpy_weights(model.state_dict(), settings), options_of(settings)
    firsts = firsts or [0] * len(srcs)
    rows = zip(srcs, tgts, firsts, strict=True)
    return [oracle.transformer(src.numpy(), tgt.numpy(), weights, options, first) for src, tgt, first in rows]


def assert_close(ours: Tensor, expected: list[oracle.Array], tolerance: float) -> None:
    """Every real position within `tolerance` of the largest logit of the batch."""
    largest = max(np.abs(logits).max() for logits in expected)
    assert ours.isfinite().all()
    for row, logits in zip(ours.detach().double().numpy(), expected, strict=True):
        np.testing.assert_allclose(row[: len(logits)], logits, rtol=0, atol=tolerance * max(1.0, largest))


@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_forward_equals_the_oracle_in_float64(options: dict[str, Any]) -> None:
    model, settings = make(dtype=torch.float64, **options)
    srcs, tgts = sentences(SRC_LENGTHS), sentences(TGT_LENGTHS, seed=1)
    ours = model.logits(model(pad(srcs), pad(tgts)))
    assert_close(ours, oracle_logits(model, settings, srcs, tgts), FLOAT64[settings.positions])


@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "no gradients"])
@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_forward_equals_the_oracle_to_float32_rounding(options: dict[str, Any], gradients: bool) -> None:
    """With gradients as in training, and without as in translation, where products may be computed differently."""
    model, settings = make(seed=1, **options)
    srcs, tgts = sentences(SRC_LENGTHS, seed=2), sentences(TGT_LENGTHS, seed=3)
    with torch.set_grad_enabled(gradients):
        ours = model.logits(model(pad(srcs), pad(tgts)))
    assert ours.dtype == torch.float32
    assert_close(ours, oracle_logits(model, settings, srcs, tgts), FLOAT32)


@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_steps_equal_the_oracle_to_float32_rounding(options: dict[str, Any]) -> None:
    """As in translation: no gradients, token by token, three beams per sentence."""
    model, settings = make(seed=1, **options)
    srcs, tgts = sentences(SRC_LENGTHS, seed=2), sentences([6] * 12, seed=3)
    with torch.inference_mode():
        state = model.start(pad(srcs), capacity=6, n_beams=3)
        ours = torch.cat([model.logits(model.advance(part, state)) for part in pad(tgts).split(1, dim=1)], 1)
    repeated = [src for src in srcs for _ in range(3)]
    assert_close(ours, oracle_logits(model, settings, repeated, tgts), FLOAT32)


@pytest.mark.parametrize("options", SINGLE.values(), ids=SINGLE)
def test_source_padded_on_the_left(options: dict[str, Any]) -> None:
    """Tokens then have later positions and do not see the padding."""
    model, settings = make(dtype=torch.float64, **options)
    lengths = (5, 1, 9, 3)
    srcs, tgts = sentences(lengths), sentences(TGT_LENGTHS, seed=1)
    ours = model.logits(model(pad(srcs, left=True, extra=1), pad(tgts)))
    expected = oracle_logits(model, settings, srcs, tgts, [10 - n for n in lengths])
    assert_close(ours, expected, FLOAT64[settings.positions])


@hypothesis_settings(max_examples=25, deadline=None)
@given(
    src_lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    tgt_length=st.integers(1, 12),
    extra=st.integers(0, 2),
    name=st.sampled_from(list(EVERY)),
    seed=st.integers(0, 2**31),
)
def test_any_shape(src_lengths: list[int], tgt_length: int, extra: int, name: str, seed: int) -> None:
    model, settings = make(dtype=torch.float64, seed=seed % 97, max_positions=14, **EVERY[name])
    srcs = sentences(src_lengths, seed=seed)
    tgts = sentences([tgt_length] * len(srcs), seed=seed + 1)
    ours = model.logits(model(pad(srcs, extra=extra), pad(tgts, extra=extra)))
    assert_close(ours, oracle_logits(model, settings, srcs, tgts), FLOAT64[settings.positions])


@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_gradients_equal_the_oracles_finite_differences(options: dict[str, Any]) -> None:
    """Along a random direction of each parameter, the label-smoothed loss rises as its gradient says."""
    options = {"n_encoder_layers": 1, "n_decoder_layers": 1} | options
    model, settings = make(dtype=torch.float64, **options)
    srcs, tgts, golds = sentences((3, 1)), sentences((2, 4), seed=1), sentences((2, 4), seed=2)
    logits = model.logits(model(pad(srcs), pad(tgts)))
    gold = pad(golds)
    log_p = logits.log_softmax(-1)
    real = gold != 0
    nll = -log_p.gather(-1, gold[..., None])[..., 0][real]
    (0.9 * nll.sum() - 0.1 * log_p.mean(-1)[real].sum()).backward()

    state, oracle_options = dict(model.state_dict(keep_vars=True)), options_of(settings)

    def loss(name: str, value: Tensor) -> float:
        tied = {other for other, weight in state.items() if weight is state[name]}
        changed = {other: value if other in tied else weight for other, weight in state.items()}
        weights = numpy_weights(changed, settings)
        pairs = zip(srcs, tgts, golds, strict=True)
        rows = ((oracle.transformer(s.numpy(), t.numpy(), weights, oracle_options), g.numpy()) for s, t, g in pairs)
        return sum(oracle.label_smoothed(row, g, 0.1)[0] for row, g in rows)

    assert_gradients(model.named_parameters(), loss, rel=1e-4, abs=1e-5)
