"""The Star-Transformer as a classifier and as an encoder, compared with the NumPy oracle."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from attentions import attention_maps
from oracle import numpy_star as oracle
from oracle.adapter import randomize
from oracle.cases import pad, sentences
from transduce.config.architectures import model_settings
from transduce.errors import SettingsError
from transduce.models.registry import build_model

LENGTHS = (5, 1, 12, 3)


def make(kind: str, **options: Any) -> nn.Module:
    settings = model_settings(kind=kind, **{"d_model": 16, "n_heads": 2, "max_positions": 14, **options})
    model = build_model(settings, n_src=13, n_tgt=13)
    randomize(model, scale=0.4)
    return model.double().eval().requires_grad_(False)


def star_of(model: nn.Module, embedded: np.ndarray, n_rounds: int = 2) -> tuple[np.ndarray, np.ndarray]:
    known = {name: weight.numpy() for name, weight in model.encoder.state_dict().items()}
    return oracle.star(embedded, oracle.from_layers(known), 2, n_rounds)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("options", [{}, {"positions": "none", "n_segments": 0}, {"n_encoder_layers": 0}], ids=str)
def test_the_classifier_equals_the_oracle(options: dict[str, Any], left: bool) -> None:
    model = make("star-classifier", n_labels=3, **options)
    texts = sentences(LENGTHS)
    segments = torch.tensor([[0] * 6 + [1] * 7] * 4)
    ours = model(pad(texts, left=left, extra=1), segments)
    weights = {name: weight.numpy() for name, weight in model.state_dict().items()}
    for n, ids, row in zip(LENGTHS, texts, ours, strict=True):
        first = 13 - n if left else 0
        e = weights["embedding.table.weight"][ids.numpy()] * 4.0
        if "positions" not in options:
            e = e + weights["embedding.positions.embedding.weight"][first : first + n]
        if "n_segments" not in options:
            e = e + weights["segment_embedding.weight"][segments[0, first : first + n].numpy()]
        h, s = star_of(model, e, options.get("n_encoder_layers", 2))
        hidden = np.maximum(oracle.affine((h.max(0) + s) / 2, weights, "dense"), 0)
        np.testing.assert_allclose(row.numpy(), oracle.affine(hidden, weights, "labels"), rtol=1e-9, atol=1e-9)


def test_the_memory_is_the_relay_node_and_the_satellite_nodes() -> None:
    model = make("star", d_ff=24, n_encoder_layers=2, n_decoder_layers=1)
    seen: list[torch.Tensor] = []
    original = model.decoder.start
    model.decoder.start = lambda memory, *rest, **options: seen.append(memory) or original(memory, *rest, **options)
    (src,) = sentences([5])
    model.start(src[None])
    h, s = star_of(model, model.src_embedding(src[None])[0].numpy())
    np.testing.assert_allclose(seen[0][0].numpy(), np.concatenate([s[None], h]), rtol=1e-9, atol=1e-9)


def test_the_relay_node_can_be_inspected() -> None:
    model = make("star", d_ff=24, n_encoder_layers=2, n_decoder_layers=1)
    (src,), (tgt,) = sentences([5]), sentences([4], seed=1)
    maps = attention_maps(model, src[None], tgt[None])
    assert "encoder" not in maps
    assert maps["relay"].shape == (2, 2, 1, 6) and maps["cross"].shape == (1, 2, 4, 6)
    np.testing.assert_allclose(maps["relay"].sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize("kind", ["star", "star-classifier"])
def test_sizes_that_do_not_fit_are_refused(kind: str) -> None:
    with pytest.raises(SettingsError, match=r"d_model = 10 is not divisible by model.n_heads = 4"):
        build_model(model_settings(kind=kind, d_model=10), n_src=9, n_tgt=9)
    with pytest.raises(SettingsError, match=r"model.positions = 'rotary'.*allowed: learned"):
        build_model(model_settings(kind=kind, positions="rotary"), n_src=9, n_tgt=9)
