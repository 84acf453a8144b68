"""Properties of every model: causality, sources of padding, steps of beams equal to one forward, limits.

Tests against the oracle show that neither padding nor other sentences of the batch have an effect.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracle.adapter import randomize
from oracle.cases import MIXED, SINGLE, VOCAB, make, pad, sentences
from transduce.config.architectures import model_settings
from transduce.models.registry import build_model

EVERY = SINGLE | MIXED
# Float64, so that only the algorithm matters: sums of other lengths are rounded differently.
ROUNDED = {"rtol": 0, "atol": 1e-9}


def logits(model: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
    return model.logits(model(src, tgt)).detach()


# --- the future -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_future_tokens_change_nothing(options: dict[str, Any]) -> None:
    """Bit for bit: the values at a masked position are multiplied by an exact zero."""
    model, _ = make(**options)
    src, tgt = pad(sentences((5, 3))), pad(sentences((8, 8), seed=1))
    before = logits(model, src, tgt)
    for t in (1, 4, 7):
        changed = tgt.clone()
        changed[:, t:] = changed[:, t:] % (VOCAB - 1) + 1  # each replaced by another token
        after = logits(model, src, changed)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.equal(after[:, t], before[:, t])


# --- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_a_source_of_padding_only_stays_finite(options: dict[str, Any], training: bool) -> None:
    """Rows with nothing to attend to: in the encoder, and in the attention to the memory."""
    model, _ = make(**{**options, "dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1})
    model.train(training)
    src, tgt = pad([torch.tensor([3, 4]), torch.tensor([], dtype=torch.long)]), pad(sentences((3, 3)))
    result = model.logits(model(src, tgt))
    result.square().mean().backward()
    assert result.isfinite().all()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())


# --- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "n_beams"), [*((options, 3) for options in EVERY.values()), ({}, 1)], ids=[*EVERY, "one beam"]
)
def test_beams_that_are_reordered_and_sentences_that_leave(options: dict[str, Any], n_beams: int) -> None:
    """After any sequence of reorder and select, each row's next logits equal one forward over its history."""
    model, _ = make(dtype=torch.float64, **options)
    src = pad(sentences((5, 2, 7)))
    state = model.start(src, capacity=7, n_beams=n_beams)
    alive, history = torch.arange(3), torch.empty(3 * n_beams, 0, dtype=torch.long)
    for n_steps, stay in ((1, [0, 1, 2]), (3, [0, 2]), (1, [1]), (2, [0])):  # stay: indices of remaining sentences
        assert state.n_rows == len(history) == len(alive) * n_beams
        ids = torch.randint(1, VOCAB, (len(history), n_steps))
        ours = model.logits(model.advance(ids, state))
        history = torch.cat([history, ids], 1)
        theirs = model.logits(model(src[alive].repeat_interleave(n_beams, 0), history))[:, -n_steps:]
        torch.testing.assert_close(ours, theirs, **ROUNDED)
        picks = torch.randint(0, n_beams, (len(alive), n_beams))
        rows = (torch.arange(len(alive))[:, None] * n_beams + picks).flatten()
        state.reorder(rows)
        history = history[rows]
        kept = torch.tensor(stay)
        state.select(kept)
        alive, history = alive[kept], history.view(-1, n_beams, history.shape[1])[kept].flatten(0, 1)


def test_two_states_do_not_disturb_each_other() -> None:
    """The memory of a decoder is an argument, not a part of the model."""
    model, _ = make(dtype=torch.float64)
    src, tgt = pad(sentences((5, 3))), pad(sentences((4, 4), seed=1))
    one, other = model.start(src, capacity=4), model.start(src.flip(0), capacity=4)
    ours = []
    for part in tgt.split(1, dim=1):
        ours.append(model.logits(model.advance(part, one)))
        model.logits(model.advance(part.flip(0) % 5 + 1, other))
    torch.testing.assert_close(torch.cat(ours, 1), model.logits(model(src, tgt)), **ROUNDED)


# --- limits -----------------------------------------------------------------------------------------------------------


def test_only_learned_positions_have_a_maximum_length() -> None:
    src, tgt = pad(sentences((20,))), pad(sentences((15,), seed=1))
    longer, _ = make(max_positions=40)
    model, _ = make(max_positions=12)
    torch.testing.assert_close(logits(model, src, tgt), logits(longer, src, tgt))
    learned, _ = make(positions="learned", max_positions=12)
    with pytest.raises(ValueError, match="12 learned positions"):
        learned(src, tgt)


def test_dropout_is_used_in_training_only_and_depends_on_the_generator_only() -> None:
    model, _ = make(dropout=0.3, attention_dropout=0.2, activation_dropout=0.2)
    src, tgt = pad(sentences((5, 3))), pad(sentences((4, 4), seed=1))
    assert torch.equal(logits(model, src, tgt), logits(model, src, tgt))
    model.train()
    state = torch.get_rng_state()
    first, second = logits(model, src, tgt), logits(model, src, tgt)
    torch.set_rng_state(state)
    assert torch.equal(logits(model, src, tgt), first)
    assert not torch.equal(first, second)


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
