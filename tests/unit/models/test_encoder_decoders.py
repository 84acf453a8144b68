"""What every encoder-decoder must do: steps equal the whole sequence, and search finds the best output.

An architecture adds a row to MODELS.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from oracle import search as oracle
from oracle.adapter import randomize
from oracle.cases import pad, sentences
from oracle.stand_in import untrained
from transduce.config.decoding import DecodingOptions
from transduce.config.kinds import model_settings
from transduce.config.settings import Settings
from transduce.decoding.search import beam_search
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


@pytest.mark.parametrize("name", MODELS)
def test_neighbours_and_padding_change_nothing(name: str) -> None:
    model = model_of(name)
    srcs, tgts = sentences((5, 1, 8, 3)), sentences((4, 8, 1, 6), seed=1)
    together = model(pad(srcs, extra=2), pad(tgts, extra=1))
    for src, tgt, row in zip(srcs, tgts, together, strict=True):
        torch.testing.assert_close(row[: len(tgt)], model(src[None], tgt[None])[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_a_wide_beam_finds_the_exhaustive_best(name: str) -> None:
    asked = Settings.from_mapping({"model": {"d_model": 16, **MODELS[name]}})
    model = untrained(asked, n_src=6, n_tgt=6)

    def next_log_probs(src: Any, prefix: Any) -> list[float]:
        logits = model.logits(model(torch.tensor([src]), torch.tensor([[2, *prefix]])))
        return logits[0, -1].double().log_softmax(-1).tolist()

    srcs = [[4, 5, 1], [5]]
    ours = beam_search(
        model, pad([torch.tensor(src) for src in srcs]), DecodingOptions(beam=40, n_best=8), max_length=3
    )
    for src, found in zip(srcs, ours, strict=True):
        every = oracle.all_outputs(next_log_probs, src, max_length=3, alpha=1.0)
        assert [h.ids for h in found if h.finished] == [one[0] for one in every[: len(found)]]
        assert found[0].score == pytest.approx(every[0][2], rel=1e-4, abs=1e-6)
