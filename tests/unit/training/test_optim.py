"""Optimizers compared with PyTorch's and with their equations; parameter groups; saved states."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from native_engines import needs_training_kernels
from oracle.cases import SINGLE, make
from transduce.config.architectures import model_settings
from transduce.config.settings import TrainingSettings
from transduce.errors import SettingsError
from transduce.kernels import optimizer as native
from transduce.models.registry import build_model
from transduce.text.special import BOS, EOS
from transduce.training.optim import (
    OPTIMIZERS,
    Muon,
    build_optimizer,
    load_optimizer_tensors,
    optimizer_tensors,
    orthogonalize,
)
from transduce.training.ranks import gradient_norm

BFLOAT16 = 2**-8


def walk(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], *, n_steps: int = 5, seed: int = 0) -> None:
    """Some steps with the same random gradients of varying size."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(n_steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** (step % 3 - 1)
        optimizer.step()


def copies(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


def settings(**options: Any) -> TrainingSettings:
    return TrainingSettings(**({"lr": 5e-3, "matrix_lr": 1e-2} | options))


# --- Adam -------------------------------------------------------------------------------------------------------------


def adam_by_hand(x: np.ndarray, gradients: list[np.ndarray], *, lr: float) -> np.ndarray:
    """Kingma and Ba 2015, algorithm 1, with the paper's constants (5.3)."""
    beta1, beta2, epsilon = 0.9, 0.98, 1e-9
    m = v = np.zeros_like(x)
    for t, g in enumerate(gradients, 1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        x = x - lr * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + epsilon)
    return x


@pytest.fixture(params=["auto", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    """The setting of `training.kernels`."""
    return str(request.param)


@pytest.mark.parametrize("shape", [(3, 5), (257, 300)], ids=str)
def test_adam_equals_the_papers_formula(shape: tuple[int, int], kernels: str) -> None:
    layer = nn.Linear(*reversed(shape), bias=False)
    start, gradients = layer.weight.detach().double().numpy(), [torch.randn(shape) for _ in range(6)]
    optimizer = build_optimizer(layer, settings(optimizer="adam", lr=0.01, kernels=kernels))
    for g in gradients:
        layer.weight.grad = g.clone()
        optimizer.step()
    expected = adam_by_hand(start, [g.double().numpy() for g in gradients], lr=0.01)
    np.testing.assert_allclose(layer.weight.detach().numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_and_adamw_equal_pytorchs_plain_ones(name: str, kernels: str) -> None:
    model, _ = make()
    options = settings(optimizer=name, lr=0.02, betas=(0.8, 0.95), weight_decay=0.1, kernels=kernels)
    params = list(model.parameters())
    theirs = copies(params)
    plain = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-9, "foreach": False, "fused": False}
    if name == "adam":  # has no decay
        reference: torch.optim.Optimizer = torch.optim.Adam(theirs, **plain)
    else:  # decays matrices: not norms, not biases
        groups = [
            {"params": [p for p in theirs if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in theirs if p.ndim == 1], "weight_decay": 0.0},
        ]
        reference = torch.optim.AdamW(groups, **plain)
    walk(build_optimizer(model, options), params)
    walk(reference, theirs)
    for mine, other in zip(params, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_takes_scaled_gradients(name: str, kernels: str) -> None:
    found = []
    for scales in ((1.0, 0.25), (1.0, 1.0)):  # powers of two, which round nothing
        torch.manual_seed(3)
        model, _ = make()
        optimizer = build_optimizer(model, settings(optimizer=name, kernels=kernels))
        for wanted, scale in zip((1.0, 0.25), scales, strict=True):  # first moments do not depend on the scale
            for p in model.parameters():
                p.grad = torch.randn_like(p) * (wanted / scale)
            optimizer.step(scale=scale)
        found.append([p.detach() for p in model.parameters()] + list(optimizer_tensors(optimizer).values()))
    for mine, other in zip(*found, strict=True):
        assert torch.equal(mine, other)


@needs_training_kernels
def test_the_library_updates_plain_float32_weights() -> None:
    x = torch.zeros(4, 6)
    assert native.reaches([x, nn.Parameter(x)]) and native.reaches([])
    assert not native.reaches([x, x.t()]) and not native.reaches([x.double()]) and not native.reaches([x.bfloat16()])


def test_clipping_where_only_matrices_have_gradients(kernels: str) -> None:
    model, _ = make()
    optimizer = build_optimizer(model, settings(optimizer="muon", kernels=kernels))
    matrix = optimizer.param_groups[0]["params"][0]
    matrix.grad, before = torch.randn_like(matrix), matrix.detach().clone()
    optimizer.step(scale=0.5)
    assert not torch.equal(matrix, before)


@pytest.mark.parametrize("change", [lambda x: x[:1].flatten()[:1], lambda x: x.double(), lambda x: x.int()])
def test_moments_of_another_shape_or_type_are_refused(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, _ = make()
    optimizer = build_optimizer(model, settings(optimizer="adam"))
    walk(optimizer, list(model.parameters()), n_steps=1)
    saved = optimizer_tensors(optimizer)
    saved["0.exp_avg"] = change(saved["0.exp_avg"])
    with pytest.raises(ValueError, match=r"0\.exp_avg is .*, not "):
        load_optimizer_tensors(optimizer, saved)


@needs_training_kernels
def test_the_state_of_adam_is_that_of_pytorchs_with_either_kernels() -> None:
    """A run that began with one may continue with the other; a parameter without a gradient keeps its state."""
    params = [nn.Parameter(torch.randn(shape)) for shape in ((40, 70), (3,), (2, 5))]
    pairs = []
    for first, second in (("auto", "torch"), ("torch", "auto")):
        given = copies(params)
        optimizer = build_optimizer(nn.ParameterList(given), settings(optimizer="adam", kernels=first))
        walk(optimizer, given, n_steps=3)
        saved = optimizer_tensors(optimizer)
        resumed = build_optimizer(nn.ParameterList(given), settings(optimizer="adam", kernels=second))
        load_optimizer_tensors(resumed, saved)
        given[1].grad = None
        for p in (given[0], given[2]):
            p.grad = torch.ones_like(p)
        resumed.step()
        pairs.append(given + list(optimizer_tensors(resumed).values()))
        assert [int(optimizer_tensors(resumed)[f"{i}.step"]) for i in range(3)] == [4, 3, 4]
    for mine, other in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(1,), (5, 40_000, 3), (32_768,), (0, 7)], ids=str)
def test_the_norm_of_gradients(sizes: tuple[int, ...]) -> None:
    params = [nn.Parameter(torch.zeros(n)) for n in sizes]
    for p in params:
        p.grad = torch.randn(p.shape)
    exact = torch.cat([p.grad.double() for p in params if p.grad is not None]).norm()
    assert abs(gradient_norm([*params, nn.Parameter(torch.zeros(2))]).double() - exact) <= 1e-6 * exact
    for bad in (math.inf, math.nan):
        params[-1].grad = torch.full((sizes[-1],), bad)
        assert not gradient_norm(params).isfinite()


# --- Muon -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (1, 7), (16, 64)], ids=str)
def test_orthogonalize_keeps_directions_and_evens_out_lengths(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape)
    result = orthogonalize(matrices).float()
    for matrix, made in zip(matrices, result, strict=True):
        u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
        inner = u.T @ made @ vt.T  # diagonal where the singular vectors are the same
        assert inner.diagonal().min() > 0.5 and inner.diagonal().max() < 1.35
        assert (inner - inner.diagonal().diag()).abs().max() < 0.05


def test_orthogonalize_of_zeros_is_zeros() -> None:
    assert (orthogonalize(torch.zeros(2, 3, 4)) == 0).all()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_muon_equals_pytorchs(weight_decay: float) -> None:
    """Square, wide, tall, several of one shape: batched here, one by one in PyTorch, both in bfloat16.

    The native kernel, which rounds less, has a separate test.
    """
    params = [nn.Parameter(torch.randn(shape)) for shape in ((8, 8), (6, 20), (20, 6), (8, 8), (6, 20), (1, 9))]
    theirs = copies(params)
    before = copies(params)
    muon = Muon([{"params": params, "peak_lr": 0.1}], lr=0.1, weight_decay=weight_decay)
    muon.by_library = False
    walk(muon, params)
    reference = torch.optim.Muon(
        theirs, lr=0.1, weight_decay=weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    walk(reference, theirs)
    for mine, other, start in zip(params, theirs, before, strict=True):
        way = (other - start).abs().max().item()
        assert way > 0.05
        torch.testing.assert_close(mine, other, rtol=0, atol=2 * BFLOAT16 * way)


def test_muon_has_a_momentum_for_each_group(kernels: str) -> None:
    params = [nn.Parameter(torch.zeros(3, 4)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": [p], "momentum": m} for p, m in zip(params, (0.5, 0.9), strict=True)]
    optimizer = Muon(groups, lr=0.1)
    optimizer.by_library = kernels == "auto"
    for p in params:
        p.grad = torch.ones(3, 4)
    optimizer.step()
    means = [optimizer.state[p]["momentum"].mean().item() for p in params]
    assert means == pytest.approx([0.5, 0.1])


def test_rows_that_are_not_those_of_a_matrix_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows .* \[3, 4\]"):
        Muon([{"params": [nn.Parameter(torch.zeros(6, 8))], "rows": [3, 4]}], lr=0.1)


def test_muon_splits_a_packed_matrix() -> None:
    packed = nn.Parameter(torch.randn(20, 8))
    parts = copies(list(packed.detach().split([8, 8, 4])))
    ours = Muon([{"params": [packed], "rows": [8, 8, 4]}], lr=0.1)
    theirs = Muon([{"params": parts}], lr=0.1)
    for seed in range(4):
        gradient = torch.randn(20, 8, generator=torch.Generator().manual_seed(seed))
        packed.grad = gradient.clone()
        for part, piece in zip(parts, gradient.split([8, 8, 4]), strict=True):
            part.grad = piece.clone()
        ours.step(), theirs.step()
    torch.testing.assert_close(packed, torch.cat(parts), rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", SINGLE.values(), ids=SINGLE)
def test_muon_gets_the_matrices_of_linear_layers_and_adamw_the_rest(options: dict[str, Any]) -> None:
    model, _ = make(**options)
    optimizer = build_optimizer(model, settings(optimizer="muon", lr=0.003, matrix_lr=0.02))
    peaks = {id(p): group["peak_lr"] for group in optimizer.param_groups for p in group["params"]}
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    assert peaks == {id(p): 0.02 if id(p) in matrices else 0.003 for p in model.parameters()}


def test_muon_gets_the_matrices_of_recurrent_units_gate_by_gate() -> None:
    model, _ = make(kind="rnn", d_hidden=8, cell="gru")
    optimizer = build_optimizer(model, settings(optimizer="muon", lr=0.003, matrix_lr=0.02))
    by_gate = {id(p) for group in optimizer.param_groups if group.get("rows") == [8] * 3 for p in group["params"]}
    assert by_gate == {id(p) for cell in model.decoder.layers for p in (cell.weight_ih, cell.weight_hh)}


def test_muon_updates_projections_of_queries_keys_and_values_separately() -> None:
    """As three layers: a large gradient of one does not shrink the step of another."""
    model, _ = make(n_kv_heads=2)
    weight = model.encoder.blocks[0].self_attention.query_key_value.weight
    optimizer, before = build_optimizer(model, settings(optimizer="muon", matrix_lr=0.1)), weight.detach().clone()
    gradient = torch.randn(weight.shape)
    gradient[:16] *= 1e4
    weight.grad = gradient
    optimizer.step()
    moved = (weight - before).square().mean(1).sqrt()
    query, key, value = (part.mean().item() for part in moved.split([16, 8, 8]))
    assert key == pytest.approx(query, rel=0.5) and value == pytest.approx(query, rel=0.5)


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_parameter_is_in_one_group_and_every_group_has_a_peak(name: str) -> None:
    for options in SINGLE.values():
        model, _ = make(**options)
        optimizer = build_optimizer(model, settings(optimizer=name))
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert sorted(map(id, held)) == sorted(map(id, model.parameters()))
        assert all(group["lr"] == group["peak_lr"] > 0 for group in optimizer.param_groups)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_use_the_learning_rate_of_the_group(name: str) -> None:
    """A rate of zero changes nothing; the next step uses the `lr` that the scheduler writes."""
    model, _ = make()
    optimizer, params = build_optimizer(model, settings(optimizer=name)), list(model.parameters())
    before = copies(params)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    walk(optimizer, params, n_steps=2)
    assert all(map(torch.equal, params, before))
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"]
    walk(optimizer, params, n_steps=1)
    assert not any(map(torch.equal, params, before))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_is_restored_bit_by_bit(name: str) -> None:
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer, list[nn.Parameter]]:
        model, _ = make(residual="pre", feed_forward="conv", kernel_size=3)
        return model, build_optimizer(model, settings(optimizer=name, weight_decay=0.01)), list(model.parameters())

    model, optimizer, params = fresh()
    walk(optimizer, params)
    saved = {key: value.clone() for key, value in optimizer_tensors(optimizer).items()}
    again, other, others = fresh()
    again.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
    load_optimizer_tensors(other, saved)
    kept = {key: value.clone() for key, value in saved.items()}  # further training must not change the loaded state
    walk(optimizer, params, seed=1)
    walk(other, others, seed=1)
    assert all(map(torch.equal, params, others))
    assert all(torch.equal(saved[key], kept[key]) for key in saved)


@pytest.mark.parametrize(
    "open_",
    [{}, {"optimizer": "adam"}, {"optimizer": "adamw"}, {"optimizer": "muon", "lr": 0.01}, {"lr": 0.01}],
    ids=str,
)
def test_unset_settings_are_refused_by_name(open_: dict[str, Any]) -> None:
    """Their defaults are in `transduce.tasks.defaults` only."""
    with pytest.raises(SettingsError, match=r"training\.\w+ is unset"):
        build_optimizer(make()[0], TrainingSettings(**open_))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fixed_biases_and_ruled_out_rows_are_not_trained(name: str) -> None:
    """A fixed bias of an imported model is not trained, and a state without it is complete."""
    options = model_settings(
        kind="gpt", d_model=8, d_ff=8, n_heads=2, n_decoder_layers=1, output_bias="fixed",
        dropout=0, one_end=True,
    )  # fmt: skip
    model = build_model(options, n_src=20, n_tgt=20)
    before = model.embedding.table.weight.detach().clone()
    optimizer = build_optimizer(model, settings(optimizer=name, lr=0.01, matrix_lr=0.01))
    model.logits(model(torch.tensor([[BOS, 5, 6]]))).square().sum().backward()
    model.embedding.table.weight.grad[BOS] = 0  # row of the output matrix whose logit is ruled out
    optimizer.step()
    after = model.embedding.table.weight
    assert not bool(model.output_bias.any()) and torch.equal(after[BOS], before[BOS])
    assert not torch.equal(after[EOS], before[EOS])
    saved, other = optimizer_tensors(optimizer), build_optimizer(model, settings(optimizer=name, lr=0.01, matrix_lr=1))
    load_optimizer_tensors(other, saved)
    again = optimizer_tensors(other)
    assert again.keys() == saved.keys() and all(torch.equal(again[key], saved[key]) for key in saved)
    with torch.no_grad():
        begun, ended = (model(torch.tensor([[i, 5, 6]])) for i in (BOS, EOS))
    assert torch.equal(begun, ended)


@needs_training_kernels
@pytest.mark.parametrize(
    "shape", [(1, 1), (17, 40), (40, 17), (96, 200), (200, 96), (64, 64), (130, 130), (1, 70)], ids=str
)
def test_a_step_of_muon(shape: tuple[int, int]) -> None:
    """Momentum, five Newton-Schulz steps of the smaller side and the weights, with any number of threads."""
    torch.manual_seed(2)
    given, (a, b, c) = torch.randn(3, *shape), (3.4445, -4.7750, 2.0315)
    found = []
    for n_threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(n_threads)
        places = [weight, _, mean] = [x.clone() for x in given]
        matrix = native.Matrix(*(x.data_ptr() for x in places), *shape, 2.0, 0.5, 0.9)
        native.muon([matrix], scale=0.25, coefficients=(a, b, c), steps=5)
        torch.set_num_threads(before)
        found.append(torch.stack([weight, mean]))
    assert torch.equal(*found)
    weight, grad, mean = given.double()
    mean = 0.9 * mean + 0.1 * 0.25 * grad
    torch.testing.assert_close(found[0][1].double(), mean, rtol=1e-5, atol=1e-6)
    update = 0.1 * 0.25 * grad + 0.9 * mean
    x = update / update.norm()
    x = x.mT if shape[0] > shape[1] else x
    rounded = x.bfloat16()
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
        gram = rounded @ rounded.mT
        rounded = a * rounded + (b * gram + c * gram @ gram) @ rounded
    made = (0.5 * weight - found[0][0].double()) / 2
    made = made.mT if shape[0] > shape[1] else made
    error, of_bfloat16 = ((y.double() - x).norm() for y in (made, rounded))
    assert error <= of_bfloat16 + 2**-5 * x.norm()
