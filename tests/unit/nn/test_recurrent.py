"""Units against `torch.nn.LSTM` and `GRU` with the same weights: values, gradients, step by step, bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from transduce.nn.recurrent import CELLS, Cell, CellStepper, State, StepLinear

SIZES = [(1, 1, 1, 1), (7, 3, 5, 4), (4, 2, 9, 32)]  # T, N, I, H
ORDER = {"lstm": (1, 2, 3, 0), "gru": (0, 1, 2)}  # of our gates in PyTorch's matrices


def unit(kind: str, d_in: int, d_hidden: int, seed: int = 0) -> Cell:
    torch.manual_seed(seed)
    cell = CELLS[kind](d_in, d_hidden).double()
    cell.initialize()
    for parameter in cell.parameters():
        nn.init.normal_(parameter)
    return cell


def torchs(cell: Cell, kind: str) -> nn.RNNBase:
    """PyTorch's layer with the weights of ours."""
    theirs = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](cell.input.in_features, cell.d_hidden).double()

    def ordered(x: Tensor) -> Tensor:
        parts = x.split(cell.d_hidden)
        return torch.cat([parts[i] for i in ORDER[kind]])

    with torch.no_grad():
        theirs.weight_ih_l0.copy_(ordered(cell.input.weight))
        theirs.weight_hh_l0.copy_(ordered(cell.recurrent.weight))
        theirs.bias_ih_l0.copy_(ordered(cell.input.bias))
        theirs.bias_hh_l0.zero_()
        if cell.recurrent.bias is not None:
            theirs.bias_hh_l0.copy_(ordered(cell.recurrent.bias))
    return theirs


def random_state(cell: Cell, n: int) -> State:
    return tuple(torch.randn(n, cell.d_hidden, dtype=torch.float64, requires_grad=True) for _ in range(cell.n_states))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", CELLS)
def test_values_and_gradients_are_those_of_torch(kind: str, sizes: tuple[int, int, int, int]) -> None:
    n_steps, n, d_in, d_hidden = sizes
    cell = unit(kind, d_in, d_hidden)
    x, first = torch.randn(n_steps, n, d_in, dtype=torch.float64, requires_grad=True), random_state(cell, n)
    theirs, weights = torchs(cell, kind), torch.randn(2, n_steps, n, d_hidden, dtype=torch.float64)
    found = cell(x, first)
    given = tuple(part[None] for part in first)
    expected, last = theirs(x, given if kind == "lstm" else given[0])
    torch.testing.assert_close(found[0], expected)
    if kind == "lstm":
        torch.testing.assert_close(found[1][-1], last[1][0])
        expected_loss = (expected * weights[0]).sum() + (last[1][0] * weights[1, -1]).sum()
        loss = (found[0] * weights[0]).sum() + (found[1][-1] * weights[1, -1]).sum()
    else:
        expected_loss, loss = (expected * weights[0]).sum(), (found[0] * weights[0]).sum()
    of_inputs = torch.autograd.grad(expected_loss, (x, *first), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, (x, *first), retain_graph=True), of_inputs)
    loss.backward()
    expected_loss.backward()
    for ours, name in ((cell.input, "ih"), (cell.recurrent, "hh")):
        parts = ours.weight.grad.split(d_hidden)
        ordered = torch.cat([parts[i] for i in ORDER[kind]])
        torch.testing.assert_close(ordered, getattr(theirs, f"weight_{name}_l0").grad)
        if ours.bias is not None:
            parts = ours.bias.grad.split(d_hidden)
            torch.testing.assert_close(
                torch.cat([parts[i] for i in ORDER[kind]]), getattr(theirs, f"bias_{name}_l0").grad
            )


@pytest.mark.parametrize("kind", CELLS)
def test_step_by_step_gives_the_same_values_and_gradients(kind: str) -> None:
    cell = unit(kind, 5, 4)
    x, state = torch.randn(6, 3, 5, dtype=torch.float64), random_state(cell, 3)
    weights = torch.randn(6, 3, 4, dtype=torch.float64)
    whole = cell(x, state)
    step, gates, steps = CellStepper(cell), cell.input(x), []
    now = state
    for t in range(6):
        now = step(gates[t], now)
        steps.append(now[0])
    torch.testing.assert_close(torch.stack(steps), whole[0])
    wanted = (*cell.parameters(), *state)
    expected = torch.autograd.grad((whole[0] * weights).sum(), wanted)
    torch.testing.assert_close(torch.autograd.grad((torch.stack(steps) * weights).sum(), wanted), expected)


def test_a_layer_for_steps_collects_the_gradient_of_all_steps() -> None:
    torch.manual_seed(0)
    layer, xs = nn.Linear(4, 3), torch.randn(5, 2, 4)
    step = StepLinear(layer)
    torch.stack([step(x) for x in xs]).square().sum().backward()
    found = layer.weight.grad, layer.bias.grad
    layer.zero_grad(set_to_none=True)
    layer(xs).square().sum().backward()
    torch.testing.assert_close(found, (layer.weight.grad, layer.bias.grad))


def test_frozen_weights_pass_gradients_on() -> None:
    layer, x = nn.Linear(4, 3).requires_grad_(False), torch.randn(2, 4, requires_grad=True)
    (found,) = torch.autograd.grad(StepLinear(layer)(x).sum(), x)
    torch.testing.assert_close(found, layer.weight.sum(0).expand(2, 4))


@pytest.mark.parametrize("kind", CELLS)
def test_bfloat16_products_and_a_float32_state(kind: str) -> None:
    cell = unit(kind, 32, 32).float()
    cell.initialize()
    x = torch.randn(20, 3, 32)
    first = tuple(torch.zeros(3, 32) for _ in range(cell.n_states))
    exact = cell(x, first)[0]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = cell(x, first)[0]
        stepped, gates, now = CellStepper(cell), cell.input(x).float(), first
        for t in range(20):
            now = stepped(gates[t], now)
    assert rounded.dtype == now[0].dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0.05)
    torch.testing.assert_close(now[0], rounded[-1], rtol=0, atol=1e-6)
    rounded.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in cell.parameters())
