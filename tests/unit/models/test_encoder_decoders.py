"""Steps of every encoder-decoder equal the whole sequence. An architecture adds a row to MODELS."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from oracle.adapter import randomize
from oracle.cases import pad, sentences
from transduce.config.architectures import model_settings
from transduce.models.registry import build_model

MODELS: dict[str, dict[str, Any]] = {
    "Transformer": {"d_ff": 24, "n_heads": 2, "n_encoder_layers": 1, "n_decoder_layers": 2},
    "ConvS2S": {"kind": "convs2s", "d_conv": 12, "n_encoder_layers": 1, "n_decoder_layers": 2},
    "ConvS2S, wide kernel": {
        "kind": "convs2s",
        "kernel_size": 5,
        "positions": "none",
        "n_encoder_layers": 0,
        "n_decoder_layers": 2,
    },
    "ConvS2S, no neighbours": {
        "kind": "convs2s",
        "kernel_size": 1,
        "tie": "none",
        "n_encoder_layers": 1,
        "n_decoder_layers": 1,
    },
    "RNN, Bahdanau": {"kind": "rnn", "attention": "bahdanau", "cell": "gru", "d_hidden": 12},
    "RNN, Luong": {"kind": "rnn", "attention": "dot", "input_feeding": False, "d_hidden": 12},
    "RNN, input feeding": {"kind": "rnn", "attention": "concat", "n_decoder_layers": 2, "d_hidden": 12},
    "RNN, no attention": {
        "kind": "rnn",
        "attention": "none",
        "direction": "backward",
        "bridge": "copy",
        "d_hidden": 12,
    },
    "Star": {"kind": "star", "d_ff": 24, "n_heads": 2, "n_encoder_layers": 2, "n_decoder_layers": 1},
}


@cache
def model_of(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    model = build_model(model_settings(d_model=16, **MODELS[name]), n_src=13, n_tgt=13)
    randomize(model)
    return model.to(dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_steps_equal_the_whole_sequence(name: str, left: bool) -> None:
    """Three beams a sentence, reordered on the way; then one of the sentences leaves."""
    model = model_of(name)
    src, rows = pad(sentences((5, 1, 3)), left=left, extra=1), torch.stack(sentences([7] * 9, seed=4))
    state, keep = model.start(src, capacity=7, n_beams=3), torch.arange(3)
    for t in range(7):
        ours = model.logits(model.advance(rows[:, t : t + 1], state))[:, 0]
        whole = model.logits(model(src[keep.repeat_interleave(3)], rows[:, : t + 1]))[:, -1]
        torch.testing.assert_close(ours, whole, rtol=1e-6, atol=1e-6)
        assert state.length == t + 1 and state.n_rows == len(rows)
        if t in (1, 3):
            moved = torch.tensor([1, 1, 0, 5, 3, 4, 8, 8, 8])
            state.reorder(moved)
            rows = torch.cat([rows[moved, : t + 1], rows[:, t + 1 :]], 1)
        if t == 4:
            keep = torch.tensor([2, 0])
            state.select(keep)
            rows = torch.cat([rows[6:9], rows[0:3]])
