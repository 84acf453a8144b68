"""Recurrent encoder-decoders against the papers' equations in NumPy; padding, steps, settings."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attentions import attention_maps
from oracle.cases import pad
from oracle.numpy_rnn import Options, hidden_states
from transduce.config.architectures import RecurrentSettings
from transduce.errors import SettingsError
from transduce.models.registry import build_model, check_model
from transduce.models.rnn import ATTENTIONS

VOCAB = 11
CHOICES: dict[str, Any] = {
    "cell": ["lstm", "gru"],
    "attention": list(ATTENTIONS),
    "input_feeding": [True, False],
    "direction": ["both", "forward", "backward"],
    "bridge": ["dense", "copy"],
    "d_model": [1, 8],
    "d_hidden": [2, 12],
    "n_encoder_layers": [1, 2],
    "n_decoder_layers": [1, 3],
    "tie": ["three_way", "two_way", "none"],
    "readout_scale": [4.0, 1.0, 0.3],
}


def combination(seed: int) -> dict[str, Any]:
    generator = random.Random(seed)
    chosen = {key: generator.choice(values) for key, values in CHOICES.items()}
    chosen["attention"] = list(ATTENTIONS)[seed % len(ATTENTIONS)]
    if chosen["bridge"] == "copy":
        chosen["n_encoder_layers"] = chosen["n_decoder_layers"]
    return chosen


def make(seed: int = 0, **options: Any) -> tuple[nn.Module, RecurrentSettings]:
    settings = RecurrentSettings(**{"dropout": 0.0, "d_model": 8, "d_hidden": 12, **options})
    torch.manual_seed(seed)
    model = build_model(settings, n_src=VOCAB, n_tgt=VOCAB).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model, settings


def sentences(*lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (n,), generator=generator) for n in lengths]


SRCS, TGTS = sentences(4, 1, 7), sentences(3, 5, 1, seed=1)


def oracle(model: nn.Module, s: RecurrentSettings, src: Tensor, tgt: Tensor) -> tuple[np.ndarray, np.ndarray]:
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    options = Options(**{name: getattr(s, name) for name in Options.__annotations__})
    return hidden_states(weights, options, src.tolist(), tgt.tolist())


@pytest.mark.parametrize("seed", range(20))
def test_a_padded_batch_agrees_with_the_equations(seed: int) -> None:
    model, s = make(seed, **combination(seed))
    with torch.no_grad():
        found = model(pad(SRCS, extra=2), pad(TGTS, extra=1))
    for row, src, tgt in zip(found, SRCS, TGTS, strict=True):
        np.testing.assert_allclose(row[: len(tgt)].numpy(), oracle(model, s, src, tgt)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("attention", [name for name in ATTENTIONS if name != "none"])
def test_attention_can_be_inspected(attention: str) -> None:
    model, s = make(attention=attention)
    maps = attention_maps(model, SRCS[0][None], TGTS[1][None])
    assert maps.keys() == {"cross"}
    expected = oracle(model, s, SRCS[0], TGTS[1])[1]
    np.testing.assert_allclose(maps["cross"][0, 0], expected, rtol=1e-5)


def test_a_model_without_attention_has_no_maps() -> None:
    maps = attention_maps(make(attention="none")[0], SRCS[0][None], TGTS[1][None])
    assert not maps


def test_dropout_changes_training_only() -> None:
    model, _ = make(dropout=0.5, n_encoder_layers=2, n_decoder_layers=2)
    src, tgt = pad(SRCS), pad(TGTS)
    assert torch.equal(model(src, tgt), model(src, tgt))
    model.train()
    assert not torch.equal(model(src, tgt), model(src, tgt))


@pytest.mark.parametrize("seed", range(len(ATTENTIONS)))
def test_weights_in_bfloat16(seed: int) -> None:
    model, _ = make(seed, **{**combination(seed), "d_model": 8, "d_hidden": 12})
    for parameter in model.parameters():
        parameter.data *= 0.3
    with torch.no_grad():
        exact, rounded = model(pad(SRCS), pad(TGTS)), model.bfloat16()(pad(SRCS), pad(TGTS))
        state = model.start(pad(SRCS), capacity=5, n_beams=2)
        steps = [model.advance(pad(TGTS)[:, t : t + 1].repeat_interleave(2, 0), state) for t in range(5)]
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), exact, rtol=0, atol=0.05)
    torch.testing.assert_close(torch.cat(steps, 1)[::2], rounded, rtol=0, atol=0.02)


def test_a_source_of_padding_gives_finite_states() -> None:
    model, _ = make()
    with torch.no_grad():
        assert model(torch.zeros(2, 3, dtype=torch.long), pad(TGTS[:2])).isfinite().all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cell": "rnn"}, "model.cell = 'rnn'.*lstm, gru"),
        ({"attention": "luong"}, "model.attention = 'luong'.*bahdanau"),
        ({"direction": "left"}, "both, forward, backward"),
        ({"d_hidden": 7}, "needs an even model.d_hidden, not 7"),
        ({"bridge": "copy", "n_decoder_layers": 2}, "n_encoder_layers = 1 and model.n_decoder_layers = 2"),
    ],
)
def test_errors_name_what_was_given_and_what_is_allowed(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        check_model(RecurrentSettings(**options))
