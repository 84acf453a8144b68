"""Transformer-XL compared with its equations, with Hugging Face's numbers, and with cached steps."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from oracle import make_transfo_xl as kept
from oracle import numpy_transformer_xl as oracle
from oracle.adapter import fitting, randomize
from oracle.differences import assert_gradients
from oracle.numpy_transformer import Array
from transduce.config.decoding import DecodingOptions
from transduce.config.model import ModelSettings
from transduce.decoding.sampling import sample
from transduce.kernels.accelerate import accelerate
from transduce.models.registry import build_model
from transduce.models.transformer_xl import TransformerXL
from transduce.nn.positions import halves

VOCAB = 13
SMALL: dict[str, Any] = {
    "d_model": 12, "d_ff": 20, "n_heads": 3, "n_decoder_layers": 2, "dropout": 0.0, "segment_length": 4,
    "memory_length": 5,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "paper": {},
    "pre": {"residual": "pre", "norm": "rms", "activation": "gelu"},
    "gated": {"feed_forward": "gated", "tie": "none", "output_bias": True},
    "no memory": {"memory_length": 0},
    "memory of one": {"memory_length": 1, "n_heads": 1},
    "memory of several segments": {"memory_length": 9, "segment_length": 3, "scale_embeddings": False},
    "segments of one": {"segment_length": 1, "memory_length": 3},
    "odd width, no bias": {"d_model": 15, "n_heads": 5, "bias": False, "n_decoder_layers": 3},
}


def make(*, seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[TransformerXL, ModelSettings]:
    settings = fitting(kind="transformer-xl", **{**SMALL, **options})
    model = build_model(settings, n_src=VOCAB, n_tgt=VOCAB).eval()
    randomize(model, seed=seed)
    assert isinstance(model, TransformerXL)
    return model.to(dtype), settings


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def weights_of(state: Mapping[str, Tensor]) -> dict[str, Array]:
    """A model's weights under the names of the oracle."""
    known = {name: tensor.detach().double().numpy() for name, tensor in state.items()}
    found = {"embedding": known["embedding.table.weight"], "output": known["output_embedding.weight"]}
    found |= {"u": known["decoder.distances.content_bias"], "v": known["decoder.distances.position_bias"]}
    if "output_bias" in known:
        found["output_bias"] = known["output_bias"]
    for name, value in known.items():
        at = name.removeprefix("decoder.").removeprefix("blocks.")
        if name.endswith("self_attention.query_key_value.weight"):
            layer = at.split(".")[0]
            for part, rows in zip(("query", "key", "value"), np.split(value, 3), strict=True):
                found[f"{layer}.attention.{part}"] = rows
        at = at.replace("self_attention_residual.norm", "attention_norm").replace("_residual.norm", "_norm")
        at = at.replace("self_attention.", "attention.").replace(".attention.output.weight", ".attention.output")
        at = at.replace(".distance.weight", ".distance")
        for layer in ("expand", "contract"):
            at = at.replace(f"{layer}.weight", layer).replace(f"{layer}.bias", f"{layer}_bias")
        found[at] = value
    return found


def options_of(s: Any) -> oracle.Options:
    return oracle.Options(
        n_heads=s.n_heads, n_layers=s.n_decoder_layers, longest=s.memory_length + s.segment_length - 1,
        residual=s.residual, norm=s.norm, norm_epsilon=1e-6 if s.norm == "rms" else 1e-5, activation=s.activation,
        feed_forward=s.feed_forward, scale_embeddings=s.scale_embeddings,
    )  # fmt: skip


def read(model: TransformerXL, ids: Tensor, *, memory_length: int | None = None) -> Tensor:
    """Logits of texts that are read segment by segment with a carry."""
    carry: tuple[Tensor, ...] = ()
    parts = []
    for part in ids.split(model.segment_length, 1):
        hidden, carry = model(part, carry=carry, memory_length=memory_length)
        parts.append(model.logits(hidden))
    return torch.cat(parts, 1)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("n_tokens", [1, 4, 15])
def test_a_text_in_segments_equals_the_oracle(options: dict[str, Any], n_tokens: int) -> None:
    model, settings = make(**options)
    s: Any = settings
    ids = random_ids(2, n_tokens)
    ours = read(model, ids)
    weights = weights_of(model.state_dict())
    for row, logits in zip(ids, ours, strict=True):
        expected = oracle.language_model(
            row.numpy(), weights, options_of(s), segment_length=s.segment_length, memory_length=s.memory_length
        )
        np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=0, atol=3e-6 * np.abs(expected).max())


@pytest.mark.parametrize("options", [CASES["paper"], CASES["pre"], CASES["gated"]], ids=["paper", "pre", "gated"])
def test_gradients_equal_the_oracles_finite_differences(options: dict[str, Any]) -> None:
    """The loss of a segment along a random direction of each parameter, for a given memory."""
    model, settings = make(**options)
    (first, ids), o = random_ids(1, 10).split([4, 6], 1), options_of(settings)
    _, carry = model(first)
    memory = [part[0].numpy() for part in carry]
    gold = random_ids(6, seed=1)
    hidden, _ = model(ids, carry=carry)
    nn.functional.cross_entropy(model.logits(hidden)[0], gold, reduction="sum").backward()
    state = dict(model.state_dict(keep_vars=True))

    def loss(name: str, value: Tensor) -> float:
        tied = {other for other, weight in state.items() if weight is state[name]}
        changed = {other: value if other in tied else weight for other, weight in state.items()}
        weights = weights_of(changed)
        x = weights["embedding"][ids[0].numpy()] * (np.sqrt(12) if o.scale_embeddings else 1.0)
        logits = oracle.segment(x, memory, weights, o)[0] @ weights["output"].T + weights.get("output_bias", 0.0)
        return float(nn.functional.cross_entropy(torch.from_numpy(logits), gold, reduction="sum"))

    assert_gradients(model.named_parameters(), loss, rel=1e-4, abs=2e-5)


def test_hidden_states_equal_those_of_hugging_face() -> None:
    """Written by oracle/make_transfo_xl.py with transformers 4.35.2: the same weights, texts, memory and segments."""
    found = json.loads(kept.PATH.read_text(encoding="utf-8"))
    settings = fitting(
        kind="transformer-xl", d_model=kept.D_MODEL, d_ff=kept.D_FF, n_heads=kept.HEADS, dropout=0.0,
        n_decoder_layers=kept.LAYERS, memory_length=kept.MEMORY, segment_length=kept.SEGMENT,
    )  # fmt: skip
    model: Any = build_model(settings, n_src=kept.VOCAB, n_tgt=kept.VOCAB).eval().double()
    d, heads = kept.D_MODEL, (kept.HEADS, kept.D_MODEL // kept.HEADS)
    shapes = {
        "decoder.distances.content_bias": ("r_w_bias", heads),
        "decoder.distances.position_bias": ("r_r_bias", heads),
        "embedding.table.weight": ("word_emb.emb_layers.0.weight", (kept.VOCAB, d)),
    }
    for n in range(kept.LAYERS):
        ours, theirs = f"decoder.blocks.{n}", f"layers.{n}"
        shapes[f"{ours}.self_attention.query_key_value.weight"] = (f"{theirs}.dec_attn.qkv_net.weight", (3 * d, d))
        shapes[f"{ours}.self_attention.distance.weight"] = (f"{theirs}.dec_attn.r_net.weight", (d, d))
        shapes[f"{ours}.self_attention.output.weight"] = (f"{theirs}.dec_attn.o_net.weight", (d, d))
        for kind in ("weight", "bias"):
            for residual, norm in (("self_attention", "dec_attn"), ("feed_forward", "pos_ff")):
                shapes[f"{ours}.{residual}_residual.norm.{kind}"] = (f"{theirs}.{norm}.layer_norm.{kind}", (d,))
        for part, at, shape in (("expand", 0, (kept.D_FF, d)), ("contract", 3, (d, kept.D_FF))):
            shapes[f"{ours}.feed_forward.{part}.weight"] = (f"{theirs}.pos_ff.CoreNet.{at}.weight", shape)
            shapes[f"{ours}.feed_forward.{part}.bias"] = (f"{theirs}.pos_ff.CoreNet.{at}.bias", shape[:1])
    parameters = dict(model.named_parameters())
    assert parameters.keys() == shapes.keys()
    with torch.no_grad():
        for name, (theirs, shape) in shapes.items():
            value = torch.from_numpy(kept.weight(theirs, shape))
            if name.endswith("distance.weight"):  # their sinusoids are all sines, then all cosines
                value = value[:, halves(d).argsort()]
            parameters[name].copy_(value.view_as(parameters[name]))
        carry: tuple[Tensor, ...] = ()
        parts = []
        for part in torch.tensor(found["ids"]).split(kept.SEGMENT, 1):
            hidden, carry = model(part, carry=carry)
            parts.append(hidden)
    torch.testing.assert_close(torch.cat(parts, 1), torch.tensor(found["hidden"]).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("n_known", [0, 1, 7])
def test_steps_after_a_prompt_equal_segments_with_a_carry(options: dict[str, Any], n_known: int) -> None:
    """Three texts, of which one leaves."""
    model, _ = make(**options)
    prompts = random_ids(3, n_known)
    rows = torch.cat([prompts, random_ids(3, 9, seed=3)], 1)
    with torch.no_grad():
        state = model.start(prompts, capacity=9)
        assert state.length == n_known
        for t in range(n_known, n_known + 9):
            ours = model.logits(model.advance(rows[:, t : t + 1], state))[:, 0]
            torch.testing.assert_close(ours, read(model, rows[:, : t + 1])[:, -1], rtol=1e-6, atol=1e-6)
            if t == n_known + 6:
                stay = torch.tensor([2, 0])
                state.select(stay)
                rows = rows[stay]


def test_the_memory_in_evaluation_is_independent_of_that_in_training() -> None:
    long, short = (make(eval_memory_length=n)[0] for n in (9, 2))
    same, _ = make()
    ids = random_ids(1, 14)
    with torch.no_grad():
        for model in (long, short):
            assert torch.equal(read(model, ids), read(same, ids)), "training does not change"
            n = model.eval_memory_length
            expected = read(model, ids, memory_length=n)
            assert not torch.allclose(expected[:, -1], read(same, ids)[:, -1])
            stepped = model.logits(model.advance(ids, model.start(ids[:, :0], capacity=14)))
            torch.testing.assert_close(stepped, expected)


def test_the_state_does_not_grow_with_the_text() -> None:
    model, _ = make()
    with torch.no_grad():
        state = model.start(random_ids(1, 40), capacity=1000)
        sizes = {layer.keys.shape[2] for layer in state.layers}
        assert sizes == {5 + 4} and all(layer.n_known <= 9 for layer in state.layers)
        model.advance(random_ids(1, 60), state)
    assert state.length == 100 and {layer.keys.shape[2] for layer in state.layers} == sizes


def test_how_far_a_token_sees() -> None:
    """A layer sees the memory; a memory was made of earlier ones. Here token 20 sees 15, which saw 7."""
    for options, reach in (({}, 13), ({"n_decoder_layers": 1}, 5), ({"memory_length": 0}, 0)):
        model, _ = make(**options)
        ids = random_ids(1, 21)
        with torch.no_grad():
            known = read(model, ids)[0, 20]  # the first token of a segment
            for distance in range(1, 21):
                changed = ids.clone()
                changed[0, 20 - distance] = ids[0, 20 - distance] % (VOCAB - 1) + 1
                assert torch.equal(read(model, changed)[0, 20], known) == (distance > reach), distance


def test_no_gradient_flows_into_the_memory() -> None:
    model, _ = make()
    _, carry = model(random_ids(1, 4))
    assert len(carry) == 2 and not any(part.requires_grad for part in carry)


def test_padding_and_the_batch_change_nothing() -> None:
    """Hypotheses of a batch are those of each prompt alone, bit for bit; padding at the end changes no other token."""
    model, _ = make(dtype=torch.float32, d_model=32, n_heads=4)
    accelerate(model, device=torch.device("cpu"), precision=torch.float32, purpose="decoding")
    prompts = random_ids(6, 7, seed=8)
    options = DecodingOptions(sample=True)
    together = sample(model, prompts, options, max_length=12, keys=[(i,) for i in range(6)])
    for i, expected in enumerate(together):
        (alone,) = sample(model, prompts[i : i + 1], options, max_length=12, keys=[(i,)])
        assert alone == expected
    with torch.no_grad():
        padded = nn.functional.pad(prompts[:, :3], (0, 1))
        hidden = model(padded)[0][:, :3]
        torch.testing.assert_close(hidden, model(prompts[:, :3])[0], rtol=1e-5, atol=1e-5)
