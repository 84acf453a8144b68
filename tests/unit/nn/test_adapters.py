"""Adapters against the model whose weights they are added to, in float64, and recomputed activations."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracle.adapter import fitting, randomize
from transduce.config.settings import LoraSettings, TrainingSettings
from transduce.data.batch import Batch, RowBatch
from transduce.models.registry import build_model
from transduce.nn.adapters import add_adapters
from transduce.nn.loss import frozen_label_smoothed_loss, label_smoothed_loss
from transduce.training.step import Updater

SIZES: dict[str, Any] = {"d_model": 16, "d_ff": 24, "n_heads": 4, "n_encoder_layers": 2, "n_decoder_layers": 2}
VOCAB, NEW, RANK, SCALE = 20, 3, 2, 1.5


def build(seed: int = 1, **options: Any) -> nn.Module:
    settings = fitting(**{**SIZES, "dropout": 0.0, **options})
    model = build_model(settings, n_src=VOCAB, n_tgt=VOCAB).double()
    randomize(model, seed=seed)
    return model


def ids(*, seed: int = 0) -> Tensor:
    drawn = torch.randint(4, VOCAB, (3, 7), generator=torch.Generator().manual_seed(seed))
    drawn[1, 5:] = 0
    return drawn


def loss_of(model: Any, *, sides: int) -> Tensor:
    hidden = model(*(ids(seed=i) for i in range(sides)))
    hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    loss, _, _ = model.output_embedding.loss(hidden, ids(seed=9), bias=model.output_bias, smoothing=0.1)
    return loss


def with_products(model: nn.Module, plain: nn.Module) -> list[tuple[Any, Tensor, int]]:
    """Add the adapters' products to the weights of a model without adapters.

    Returns each adapter with the weight of its layer and the first row that it changes.
    """
    weights, parts = dict(plain.named_parameters()), []
    for name, module in model.named_modules():
        row = 0
        for adapter in getattr(module, "adapters", ()):
            weight, rows = weights[f"{name}.weight"], slice(row, row + len(adapter.b))
            weight.data[rows] += SCALE * adapter.b.detach() @ adapter.a.detach()
            parts.append((adapter, weight, row))
            row = rows.stop
        assert not row or row == len(weight), "the adapters cover all rows"
    return parts


@pytest.mark.parametrize("on", ["attention", "all"])
@pytest.mark.parametrize(
    "options",
    [
        {"tie": "three_way"},
        {"tie": "inputs"},
        {"tie": "two_way", "n_kv_heads": 2, "feed_forward": "gated", "output_bias": True},
        {"tie": "none", "d_key": 3, "d_value": 5, "residual": "pre", "positions": "t5"},
        {"kind": "gpt", "residual": "pre"},
        {"decoder_self": "ssru", "norm": "rms", "bias": False},
    ],
)
def test_an_adapted_layer_computes_the_sum_of_its_weight_and_the_products(on: str, options: dict[str, Any]) -> None:
    """The loss and the gradients are those of a model with W + scale * B A: dB = scale dW A^T, dA = scale B^T dW."""
    plain, model = build(**options), build(**options)
    tables = {name for name in plain.state_dict() if name.endswith("table.weight") or name == "output_embedding.weight"}
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if name not in tables}
    rows = dict.fromkeys(tables, NEW)
    add_adapters(model, rank=RANK, scale=SCALE, on=on, dtype=torch.float64, new_rows=rows, trained=())
    model.double()
    sides = 1 if options.get("kind") == "gpt" else 2
    torch.testing.assert_close(loss_of(model, sides=sides), loss_of(plain, sides=sides), rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        if name.endswith(".b"):
            nn.init.normal_(parameter)
    parts = with_products(model, plain)
    ours, theirs = loss_of(model, sides=sides), loss_of(plain, sides=sides)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    ours.backward()
    theirs.backward()
    close: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-10}
    for adapter, weight, row in parts:
        gradient = weight.grad[row : row + len(adapter.b)]  # type: ignore[index]
        torch.testing.assert_close(adapter.b.grad, SCALE * gradient @ adapter.a.T, **close)
        torch.testing.assert_close(adapter.a.grad, SCALE * adapter.b.T @ gradient, **close)
    of_plain = dict(plain.named_parameters())
    new = {name: p for name, p in model.named_parameters() if name.endswith(".new")}
    assert new and len(parts) > 4
    for name, parameter in new.items():
        torch.testing.assert_close(parameter.grad, of_plain[f"{name[:-4]}.weight"].grad[-NEW:], **close)  # type: ignore[index]
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)


def test_frozen_weights_in_bfloat16_are_rounded_once() -> None:
    """The loss and the gradients are those of the rounded weights in float32; norms and biases are not rounded."""
    rounded, model = build(residual="pre").float(), build(residual="pre").float()
    for module in rounded.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data = module.weight.data.bfloat16().float()
    options: dict[str, Any] = {"rank": RANK, "scale": SCALE, "on": "attention", "new_rows": {}, "trained": ()}
    for one, dtype in ((rounded, torch.float32), (model, torch.bfloat16)):
        torch.manual_seed(1)
        add_adapters(one, dtype=dtype, **options)
        for name, parameter in one.named_parameters():
            if name.endswith(".b"):
                nn.init.normal_(parameter)
    types = {p.dtype for p in model.parameters() if p.ndim == 2 and not p.requires_grad}
    assert types == {torch.bfloat16}
    for one in (rounded, model):
        loss_of(one, sides=2).backward()
    pairs = zip(rounded.parameters(), model.parameters(), strict=True)
    for theirs, ours in ((a.grad, b.grad) for a, b in pairs if a.grad is not None):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        hidden = torch.randn(2, 5, 16)
        of_model, of_rounded = (one.output_embedding.logits(hidden, None) for one in (model, rounded))
        torch.testing.assert_close(of_model, of_rounded)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("n_new", [0, 3])
def test_the_loss_of_a_frozen_table_is_taken_in_parts(
    smoothing: float, n_new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transduce.nn.loss._LOGITS_AT_ONCE", 1)
    monkeypatch.setattr("transduce.nn.loss._FEWEST_TOKENS", 6)  # the last part is smaller
    generator = torch.Generator().manual_seed(1)
    hidden, twice = (torch.randn(3, 7, 16, generator=generator.manual_seed(2)).double().requires_grad_() for _ in "ab")
    weight = torch.randn(VOCAB, 16, generator=generator).double().requires_grad_()
    bias, targets = torch.randn(VOCAB, generator=generator).double(), ids()
    new = nn.Parameter(weight.detach()[VOCAB - n_new :].clone()) if n_new else None
    ours = frozen_label_smoothed_loss(
        hidden, weight.detach()[: VOCAB - n_new], new, targets, bias=bias, smoothing=smoothing
    )
    theirs = label_smoothed_loss(twice, weight, targets, bias=bias, smoothing=smoothing)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    (2 * ours[0]).backward()
    (2 * theirs[0]).backward()
    torch.testing.assert_close(hidden.grad, twice.grad, rtol=1e-10, atol=1e-12)
    if new is not None:
        assert weight.grad is not None
        torch.testing.assert_close(new.grad, weight.grad[-n_new:], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{"feed_forward": "conv", "kernel_size": 3}, {"decoder_self": "ssru"}, {"kind": "gpt"}]
)
def test_recomputed_activations_give_the_same_update(options: dict[str, Any]) -> None:
    """Also with dropout, whose random numbers are the same in both computations."""
    settings = fitting(**{**SIZES, "dropout": 0.3, **options})
    sides = (ids(),) if options.get("kind") == "gpt" else (ids(), ids(seed=1))
    after = []
    for recompute in (False, True):
        torch.manual_seed(1)
        model = build_model(settings, n_src=VOCAB, n_tgt=VOCAB)
        given = TrainingSettings(optimizer="adam", lr=1e-2, kernels="torch", recompute=recompute)
        updater = Updater(model, given, device=torch.device("cpu"), precision="float32")
        targets = ids(seed=2)
        n = int((targets != 0).sum())
        batch: Any = Batch(*sides, targets, n) if len(sides) == 2 else RowBatch(sides, targets, n)
        losses = [updater.update([batch], 1.0).loss_sum for _ in range(2)]
        after.append((losses, model.state_dict()))
    (losses, weights), (again, recomputed) = after
    assert losses == again and all(torch.equal(weights[name], recomputed[name]) for name in weights)


def test_the_scale_is_alpha_over_rank() -> None:
    assert LoraSettings(rank=4, alpha=2).scale == 0.5 and LoraSettings(rank=4).scale == 2
