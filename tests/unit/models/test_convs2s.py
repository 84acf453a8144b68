"""The convolutional encoder-decoder compared with the NumPy oracle, and its fresh weights. Gradients: tests/unit/nn."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attentions import attention_maps
from oracle import numpy_convs2s as oracle
from oracle.adapter import randomize
from oracle.cases import pad, sentences
from transduce.config.architectures import model_settings
from transduce.models.registry import build_model

OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {},
    "kernel of two, wide": {"kernel_size": 2, "d_conv": 24},
    "kernel of five, narrow": {"kernel_size": 5, "d_conv": 8, "n_encoder_layers": 0},
    "without positions": {"positions": "none"},
    "untied": {"tie": "none", "output_bias": True},
    "tied two ways": {"tie": "two_way", "n_decoder_layers": 1},
}


def make(dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    sizes = {"d_model": 16, "d_conv": 16, "n_encoder_layers": 2, "n_decoder_layers": 2, "max_positions": 14}
    model = build_model(model_settings(kind="convs2s", **(sizes | options)), n_src=13, n_tgt=13)
    randomize(model, scale=0.4)
    return model.to(dtype).eval()


def weights_of(model: nn.Module) -> dict[str, np.ndarray]:
    known = {name: weight.detach().double().numpy() for name, weight in model.state_dict().items()}
    weights = oracle.from_layers({name: weight for name, weight in known.items() if "coder." in name})
    for side in ("src", "tgt"):
        table = known[f"{side}_embedding.table.weight"]
        weights[f"{side}_embedding"] = table
        none = np.zeros((14, table.shape[1]))
        weights[f"{side}_positions"] = known.get(f"{side}_embedding.positions.embedding.weight", none)
    return weights | {"output": known["output_embedding.weight"], "output_bias": known.get("output_bias", np.zeros(13))}


def assert_close(ours: Tensor, expected: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(
        ours.detach().double().numpy(), expected, rtol=0, atol=tolerance * np.abs(expected).max()
    )


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_forward_equals_the_oracle(options: dict[str, Any], left: bool) -> None:
    """Padding is on the right or on the left of the source, where tokens have later positions."""
    model = make(**options)
    lengths = (5, 1, 12, 3)
    srcs, tgts = sentences(lengths), sentences((4, 14, 1, 6), seed=1)
    ours = model.logits(model(pad(srcs, left=left, extra=1), pad(tgts)))
    for n, src, tgt, row in zip(lengths, srcs, tgts, ours, strict=True):
        expected = oracle.logits(src.numpy(), tgt.numpy(), weights_of(model), 13 - n if left else 0)
        assert_close(row[: len(tgt)], expected, 1e-11)


def test_the_attention_of_every_decoder_layer_can_be_inspected() -> None:
    model = make(n_decoder_layers=3)
    (src,), (tgt,) = sentences([5]), sentences([4], seed=1)
    maps = attention_maps(model, src[None], tgt[None])
    assert maps.keys() == {"cross"}
    weights = weights_of(model)
    e = oracle.embed(src.numpy(), weights, "src")
    _, expected = oracle.decode(oracle.embed(tgt.numpy(), weights, "tgt"), oracle.encode(e, weights), e, weights)
    np.testing.assert_allclose(maps["cross"][:, 0], expected, atol=1e-6)


def test_a_sentence_beyond_the_learned_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="15 tokens; there are 14 learned positions"):
        make()(torch.ones(1, 15, dtype=torch.long), torch.ones(1, 2, dtype=torch.long))


def test_fresh_weights_follow_the_paper() -> None:
    """Normal with a variance of gain / inputs: 4 p before a gate, p after other dropout, 1 elsewhere (section 3.5)."""
    torch.manual_seed(0)
    settings = model_settings(kind="convs2s", d_model=256, d_conv=128, dropout=0.2)
    model = build_model(settings, n_src=500, n_tgt=500)
    expected = {
        "src_embedding.table.weight": 0.1,
        "tgt_embedding.positions.embedding.weight": 0.1,
        "encoder.widen.weight": (0.8 / 256) ** 0.5,
        "encoder.blocks.1.expand.weight": (4 * 0.8 / (3 * 128)) ** 0.5,
        "encoder.narrow.weight": (1 / 128) ** 0.5,
        "decoder.attentions.0.key.weight": (1 / 128) ** 0.5,
        "decoder.attentions.0.value.weight": (1 / 256) ** 0.5,
    }
    weights = model.state_dict()
    for name, std in expected.items():
        assert weights[name].std().item() == pytest.approx(std, rel=0.03), name
    assert all(not weights[name].any() for name in weights if name.endswith("bias"))
