"""Recorded values are the model's own, replaced ones have their effect, and what is switched off is off."""

import math
import threading
from typing import Any

import pytest
import torch

from transduce.config.architectures import model_settings
from transduce.errors import SettingsError
from transduce.models.registry import build_model
from transduce.nn.recording import Recording, intervene, record, switched_off, switches, twin

SRC = torch.tensor([[5, 9, 11, 7, 3]])
TGT_IN = torch.tensor([[2, 8, 6, 10]])
KINDS: list[dict[str, Any]] = [
    {},
    {"positions": "shaw"},
    {"n_kv_heads": 2, "positions": "alibi", "residual": "pre"},
    {"positions": "rotary", "decoder_pattern": "local", "window": 2},
    {"kind": "rnn", "d_hidden": 16, "attention": "bahdanau"},
    {"kind": "rnn", "d_hidden": 16, "attention": "dot", "cell": "gru"},
    {"kind": "convs2s", "d_conv": 16},
    {"kind": "star"},
]
SPARSE: list[dict[str, Any]] = [
    {"positions": positions, "encoder_pattern": pattern, "decoder_pattern": pattern, "factors": factors}
    for positions in ("shaw", "alibi", "rotary")
    for pattern in ("local", "strided", "fixed")
    for factors in ("heads", "layers")
]
LONG = torch.arange(140).view(2, 70) % 16 + 4  # sparse patterns of a decoder are computed in blocks


def a_model(kind: str = "transformer", **options: Any) -> torch.nn.Module:
    sizes = {"d_model": 16, "n_encoder_layers": 2, "n_decoder_layers": 2}
    if kind in ("transformer", "star"):
        sizes |= {"d_ff": 32, "n_heads": 4}
    torch.manual_seed(3)
    return build_model(model_settings(kind=kind, **(sizes | options)), n_src=20, n_tgt=20).eval()


@pytest.mark.parametrize("options", KINDS, ids=str)
@torch.no_grad()
def test_weights_that_replace_themselves_change_nothing(options: dict[str, Any]) -> None:
    model = a_model(**options)
    expected = model(SRC, TGT_IN)
    with record(model) as found:
        assert torch.equal(model(SRC, TGT_IN), expected), "recording does not change the output"
    names = [name for name in found if name.endswith(".weights")]
    assert names
    with intervene(model, dict.fromkeys(names, lambda weights: weights)):
        torch.testing.assert_close(model(SRC, TGT_IN), expected)
    with intervene(model, dict.fromkeys(names, lambda weights: weights.flip(-1))):
        assert (model(SRC, TGT_IN) - expected).abs().max() > 1e-4
    assert torch.equal(model(SRC, TGT_IN), expected), "the model is as before"


@pytest.mark.parametrize("options", SPARSE, ids=str)
@pytest.mark.parametrize("n", [6, 70])
@torch.no_grad()
def test_weights_of_sparse_patterns_give_the_output(options: dict[str, Any], n: int) -> None:
    model, tgt_in = a_model(window=4, summary_tokens=1, **options), LONG[:, :n]
    src = tgt_in.masked_fill(torch.tensor([[n], [n - 3]]) <= torch.arange(n), 0)
    expected = model(src, tgt_in)
    with record(model, "*.weights") as found:
        model(src, tgt_in)
    for name in found:
        sums = found.value(name).sum(-1)
        assert (((sums - 1).abs() < 1e-5) | (sums == 0)).all()
    with intervene(model, dict.fromkeys(found, lambda weights: weights)):
        torch.testing.assert_close(model(src, tgt_in), expected)


@pytest.mark.parametrize("options", KINDS, ids=str)
@torch.no_grad()
def test_scores_and_bias_give_the_weights(options: dict[str, Any]) -> None:
    model = a_model(**options)
    with record(model, ["*.scores", "*.bias", "*.weights"]) as found:
        model(SRC, TGT_IN)
    for name in [name for name in found if name.endswith(".weights")]:
        owner = name.removesuffix(".weights")
        if options.get("kind") in ("rnn", "convs2s"):
            continue  # their bias is part of the memory
        bias = found.value(f"{owner}.bias") if f"{owner}.bias" in found else 0.0
        expected = (found.value(f"{owner}.scores").double() + bias).softmax(-1)
        torch.testing.assert_close(found.value(name).double(), expected, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_the_stages_of_a_block_follow_from_one_another() -> None:
    """The equations of the paper, in float64, from the recorded values and the weights."""
    model = a_model()
    with record(model, "encoder.blocks.0.*") as found:
        model(SRC, TGT_IN)
    block: Any = model.get_submodule("encoder.blocks.0")
    name = "encoder.blocks.0.self_attention"
    x = found.value(f"{name}.input")[0].double()
    packed = x @ block.self_attention.query_key_value.weight.double().T + block.self_attention.query_key_value.bias
    for part, point in zip(packed.split(16, -1), ("query", "key", "value"), strict=True):
        heads = part.unflatten(-1, (4, 4)).transpose(0, 1)
        torch.testing.assert_close(found.value(f"{name}.{point}")[0].double(), heads, atol=1e-5, rtol=1e-5)
    weights, value = (found.value(f"{name}.{point}")[0].double() for point in ("weights", "value"))
    merged = (weights @ value).transpose(0, 1).flatten(1)
    torch.testing.assert_close(found.value(f"{name}.output.input")[0].double(), merged, atol=1e-5, rtol=1e-5)
    hidden = found.value("encoder.blocks.0.feed_forward.contract.input")[0].double()
    before = found.value("encoder.blocks.0.feed_forward.expand")[0].double()
    torch.testing.assert_close(hidden, before.clamp_min(0))


@torch.no_grad()
def test_a_head_without_effect_is_a_head_of_zeros() -> None:
    """Against the equation: the output without a head is that of W^O without the head's columns."""
    model = a_model()
    name = "encoder.blocks.0.self_attention"
    with record(model, [f"{name}.*"]) as found:
        model(SRC, TGT_IN)
    changed = switched_off(model, [f"{name}.heads.1"])
    with record(changed, [name]) as without:
        changed(SRC, TGT_IN)
    attention: Any = model.get_submodule(name)
    weight = attention.output.weight.double().clone()
    weight[:, 4:8] = 0
    expected = found.value(f"{name}.output.input").double() @ weight.T + attention.output.bias.double()
    torch.testing.assert_close(without.value(name).double(), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_every_switch_changes_a_twin_and_not_the_model() -> None:
    model = a_model()
    expected = model(SRC, TGT_IN)
    for name in switches(model):
        assert not torch.equal(switched_off(model, [name])(SRC, TGT_IN), expected), name
    assert torch.equal(model(SRC, TGT_IN), expected)
    assert switched_off(model, []) is model


@torch.no_grad()
def test_a_twin_shares_weights_and_computes_the_same() -> None:
    model = a_model()
    other = twin(model)
    assert torch.equal(other(SRC, TGT_IN), model(SRC, TGT_IN))
    ours, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    assert all(ours[name] is theirs[name] for name in ours)


@pytest.mark.parametrize("change", [torch.zeros(1, 2), lambda value: value[:, 1:]])
def test_a_replacement_of_another_shape_is_refused(change: Any) -> None:
    model = a_model()
    with (
        pytest.raises(SettingsError, match=r"feed_forward has the shape \[\d"),
        intervene(model, {"encoder.blocks.0.feed_forward": change}),
    ):
        model(SRC, TGT_IN)


def test_unknown_names_are_refused() -> None:
    model = a_model()
    with pytest.raises(SettingsError, match="no such value"), intervene(model, {"encoder.blocks.9.feed_forward": None}):
        pass
    with pytest.raises(SettingsError, match=r"cannot be switched off; did you mean 'decoder\.mask'\?") as refused:
        switched_off(model, ["decoder.maks"])
    assert str(refused.value).count(".heads.N") == 3  # one for each kind of attention, not one for each head
    with pytest.raises(SettingsError, match="no part that can be"):
        switched_off(torch.nn.Linear(2, 2), ["decoder.mask"])
    with record(model, "x*") as found:
        model(SRC, TGT_IN)
    with pytest.raises(SettingsError, match="not recorded"):
        found.value("x")


@torch.no_grad()
def test_without_positions_the_order_of_the_source_does_not_matter() -> None:
    model = switched_off(a_model(), ["src_embedding.positions"])
    torch.testing.assert_close(model(SRC, TGT_IN), model(SRC[:, [2, 0, 3, 1, 4]], TGT_IN))


@torch.no_grad()
def test_without_the_causal_mask_later_tokens_change_earlier_ones() -> None:
    model, changed = a_model(), switched_off(a_model(), ["decoder.mask"])
    other = torch.tensor([[2, 8, 6, 12]])
    assert torch.equal(model(SRC, TGT_IN)[:, :3], model(SRC, other)[:, :3])
    assert not torch.equal(changed(SRC, TGT_IN)[:, :3], changed(SRC, other)[:, :3])


@torch.no_grad()
def test_a_twin_that_is_made_while_the_model_is_recorded_and_changed_is_independent() -> None:
    model, attention = a_model(), "encoder.blocks.0.self_attention"
    feed_forward = "encoder.blocks.1.feed_forward"
    expected, off = model(SRC, TGT_IN), switched_off(model, [f"{attention}.heads.1"])(SRC, TGT_IN)
    with intervene(model, {feed_forward: None, f"{feed_forward}.input": None, f"{attention}.value": None}):
        assert torch.equal(twin(model)(SRC, TGT_IN), expected)
    with record(model) as found:
        assert torch.equal(switched_off(model, [f"{attention}.heads.1"])(SRC, TGT_IN), off)
        assert not found
        model(SRC, TGT_IN)
    assert torch.equal(switched_off(twin(model), [f"{attention}.heads.1"])(SRC, TGT_IN), off)
    assert {len(values) for values in found.values()} == {1}


@torch.no_grad()
def test_a_twin_waits_for_the_recording_of_another_thread() -> None:
    model, made = a_model(), list[torch.nn.Module]()
    thread = threading.Thread(target=lambda: made.append(twin(model)))
    with record(model):
        thread.start()
        thread.join(0.2)
        assert not made
    thread.join()
    assert made


@torch.no_grad()
def test_several_values_of_one_attention_can_be_replaced() -> None:
    model, name = a_model(), "encoder.blocks.0.self_attention"
    changes = {f"{name}.{point}": torch.neg for point in ("query", "key")}
    expected = model(SRC, TGT_IN)
    with intervene(model, changes):
        torch.testing.assert_close(model(SRC, TGT_IN), expected)


@pytest.mark.parametrize(("point", "hidden"), [("weights", 0.0), ("scores", -math.inf), ("bias", -math.inf)])
def test_keys_that_a_segment_lacks_are_hidden(point: str, hidden: float) -> None:
    steps = [torch.ones(1, 1, 2, 2), torch.ones(1, 1, 1, 3)]
    found = Recording({f"x.{point}": steps}).value(f"x.{point}")
    assert found[0, 0].tolist() == [[1.0, 1.0, hidden], [1.0, 1.0, hidden], [1.0, 1.0, 1.0]]
