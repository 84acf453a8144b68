"""Captured weights are those that the model used: the equation of attention reproduces its output."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from attentions import attention_maps
from transduce.config.architectures import model_settings
from transduce.models.registry import build_model
from transduce.nn.recording import record

SRC = torch.tensor([[5, 9, 11, 7, 3]])
TGT_IN = torch.tensor([[2, 8, 6, 10]])
OPTIONS: list[dict[str, Any]] = [
    {},
    {"residual": "pre", "n_kv_heads": 2, "positions": "rotary"},
    {"projection": "shared", "norm": "rms"},
    {"n_encoder_layers": 1, "n_decoder_layers": 3, "attention_dropout": 0.5},
]


def a_model(**options: Any) -> torch.nn.Module:
    sizes = {"d_model": 16, "d_ff": 32, "n_heads": 4, "n_encoder_layers": 2, "n_decoder_layers": 2}
    return build_model(model_settings(**(sizes | options)), n_src=20, n_tgt=20)


@pytest.mark.parametrize("options", OPTIONS)
def test_rows_sum_to_one_and_the_decoder_is_causal(options: dict[str, Any]) -> None:
    model = a_model(**options)
    maps = attention_maps(model, SRC, TGT_IN)
    n_encoder, n_decoder = options.get("n_encoder_layers", 2), options.get("n_decoder_layers", 2)
    assert maps["encoder"].shape == (n_encoder, 4, 5, 5)
    assert maps["decoder"].shape == (n_decoder, 4, 4, 4)
    assert maps["cross"].shape == (n_decoder, 4, 4, 5)
    for weights in maps.values():
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert np.triu(maps["decoder"], 1).max() == 0


def test_a_decoder_with_ssru_has_no_self_attention() -> None:
    maps = attention_maps(a_model(decoder_self="ssru"), SRC, TGT_IN)
    assert maps.keys() == {"encoder", "cross"} and maps["cross"].shape == (2, 4, 4, 5)


def test_recording_does_not_change_the_model() -> None:
    model = a_model(dropout=0.3).eval()
    with torch.no_grad():
        before = model(SRC, TGT_IN)
        with record(model):
            assert torch.equal(model(SRC, TGT_IN), before)
        assert torch.equal(model(SRC, TGT_IN), before)
    model.train()
    attention_maps(model, SRC, TGT_IN)
    assert model.training
    assert not [m for m in model.modules() if "attend" in vars(m)], "the model is restored"


def test_an_error_restores_the_model() -> None:
    model = a_model()
    with pytest.raises(IndexError):
        attention_maps(model, torch.tensor([[99, 3]]), TGT_IN)
    assert not [m for m in model.modules() if "attend" in vars(m)]
    attention_maps(model, SRC, TGT_IN)


def test_other_threads_are_not_recorded() -> None:
    model = a_model().eval()
    with torch.no_grad(), record(model, "*.weights") as weights:
        thread = threading.Thread(target=lambda: model(SRC, TGT_IN))
        thread.start()
        thread.join()
        assert not weights
        model(SRC, TGT_IN)
    assert len(weights) == 2 + 2 * 2
