"""Models of vectors compared with the oracle; padding, batches and their parts."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from oracle.adapter import encoder_weights, fitting, options_of, randomize
from oracle.numpy_transformer import Array, encode
from transduce.config.architectures import model_settings
from transduce.config.decoding import DecodingOptions
from transduce.data.batch import collate, collate_labelled, pad_sources
from transduce.data.store import Example, pack
from transduce.decoding.engine import DecodingInput
from transduce.decoding.torch_engine import TorchEngine
from transduce.errors import SettingsError
from transduce.kernels.accelerate import accelerate
from transduce.models.registry import build_model

WIDTH, VOCAB = 7, 13
SMALL: dict[str, Any] = {
    "source": "vectors", "d_model": 16, "d_ff": 24, "n_heads": 4, "dropout": 0.0, "scale_embeddings": False,
    "n_encoder_layers": 2, "n_decoder_layers": 1, "max_positions": 32, "tie": "two_way",
}  # fmt: skip


def sequences(*lengths: int, seed: int = 3) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.normal(size=(n, WIDTH)).astype(np.float32) for n in lengths]


def make(kind: str, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Module, Any]:
    s = fitting(kind=kind, **{**SMALL, **options})
    model = build_model(s, n_src=WIDTH, n_tgt=WIDTH if kind == "bert-classifier" else VOCAB).eval()
    randomize(model)
    return model.to(dtype).requires_grad_(False), s


def expected(model: nn.Module, s: Any, vectors: np.ndarray, name: str) -> Array:
    """The hidden states of one sequence by the oracle: its table of embeddings is W v + b, one row per vector."""
    state = {key.replace(name, "embedding"): value for key, value in model.state_dict().items() if "tgt" not in key}
    weight, bias = (state[f"embedding.projection.{part}"].numpy() for part in ("weight", "bias"))
    state["embedding.table.weight"] = torch.from_numpy(vectors.astype(np.float64) @ weight.T + bias)
    weights = encoder_weights(state, s, np.zeros(len(vectors), dtype=np.int64))
    return encode(np.arange(len(vectors)), weights, options_of(s))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("bert-classifier", {"n_labels": 3, "positions": "learned", "n_segments": 2, "embedding_norm": True}),
        ("bert-classifier", {"n_labels": 3, "positions": "sinusoidal", "residual": "pre"}),
        ("transformer", {}),
        ("transformer", {"positions": "rotary", "norm": "rms", "residual": "pre"}),
    ],
)
def test_hidden_states_equal_the_oracles(kind: str, options: dict[str, Any]) -> None:
    model, s = make(kind, **options)
    rows, name = sequences(5, 1, 9), "embedding" if kind == "bert-classifier" else "src_embedding"
    found = model.encode(pad_sources(rows)).numpy()
    for row, hidden in zip(rows, found, strict=True):
        np.testing.assert_allclose(hidden[: len(row)], expected(model, s, row, name), rtol=0, atol=1e-6)


def test_embedded_vectors_stay_float32_under_autocast() -> None:
    """As tokens do: the residual connections add to them."""
    model, _ = make("transformer", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.src_embedding(pad_sources(sequences(5, 2))).dtype == torch.float32


def test_padding_changes_no_gradient() -> None:
    rows = sequences(4, 2)
    model, _ = make("bert-classifier", n_labels=3, pooling="mean")
    model.requires_grad_(True)
    gradients = []
    for extra in (0, 3):
        padded = torch.nn.functional.pad(pad_sources(rows), (0, 0, 0, extra), value=torch.nan)
        model.zero_grad()
        model(padded).square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        assert gradient.isfinite().all(), name
        torch.testing.assert_close(gradients[1][name], gradient)


@pytest.mark.parametrize("beam", [1, 4])
def test_the_batch_does_not_change_an_output(beam: int) -> None:
    model, _ = make("transformer", torch.float32, d_model=64, n_heads=2)  # as in decoding/test_independence.py
    accelerate(model, device=torch.device("cpu"), precision=torch.float32, purpose="decoding")
    engine = TorchEngine(model)
    sources = [DecodingInput((i,), one, 12) for i, one in enumerate(sequences(1, 2, 15, 16, 17, 33, 3, 5, 70))]
    options = DecodingOptions(beam=beam, batch_tokens=200)
    together = engine.translate(sources, options)
    assert [engine.translate([source], options)[0] for source in sources] == together


def test_a_part_of_a_batch_is_the_batch_of_the_part() -> None:
    examples = [Example(one, [5] * n) for n, one in enumerate(sequences(2, 6, 3))]
    part, alone = collate(examples).part(0, 1), collate(examples[:1])
    assert torch.equal(part.src, alone.src)
    packed = [pack(one) for one in sequences(2, 6, 3)]
    part, alone = collate_labelled(packed, [0, 1, 2]).part(2, 3), collate_labelled(packed[2:], [2])
    assert all(map(torch.equal, (*part.inputs, part.targets), (*alone.inputs, alone.targets)))


def test_a_pair_of_sequences_has_two_segments() -> None:
    a, b = sequences(2, 3)
    packed = pack(a, b)
    assert np.array_equal(packed.ids, np.concatenate([a, b]))
    assert packed.segments.tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("tie", ["three_way", "inputs"])
def test_vectors_share_no_table_with_the_target(tie: str) -> None:
    with pytest.raises(SettingsError, match="two_way"):
        build_model(model_settings(**{**SMALL, "tie": tie}), n_src=VOCAB, n_tgt=VOCAB)
