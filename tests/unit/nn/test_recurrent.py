"""Units compared with `torch.nn.LSTMCell` and `GRUCell` with the same weights; bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from transduce.nn.recurrent import CELLS, Cell, State, initialize_cell

TORCHS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}


def run(cell: Cell, n_steps: int) -> State:
    torch.manual_seed(1)
    x = torch.randn(n_steps, 3, cell.input_size, dtype=torch.float64).to(cell.weight_ih.dtype)
    state: State = (torch.zeros(3, cell.hidden_size, dtype=x.dtype),) * cell.n_states
    for now in x:
        state = cell(now, state)
    return state


@pytest.mark.parametrize("sizes", [(1, 1), (5, 4), (9, 32)])
@pytest.mark.parametrize("kind", CELLS)
def test_a_step_is_that_of_torch(kind: str, sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    cell, theirs = (make(*sizes).double() for make in (CELLS[kind], TORCHS[kind]))
    for parameter in cell.parameters():
        nn.init.normal_(parameter)
    theirs.load_state_dict(cell.state_dict())
    x, state = torch.randn(3, sizes[0]).double(), tuple(torch.randn(cell.n_states, 3, sizes[1]).double())
    expected = theirs(x, state if kind == "lstm" else state[0])
    torch.testing.assert_close(cell(x, state), expected if kind == "lstm" else (expected,))


@pytest.mark.parametrize("kind", CELLS)
def test_bfloat16_products_and_a_float32_state(kind: str) -> None:
    cell = CELLS[kind](32, 32)
    initialize_cell(cell)
    exact = run(cell, 20)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = run(cell, 20)
    assert {part.dtype for part in rounded} == {torch.float32}
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0.05)
    rounded[0].sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in cell.parameters())


def test_the_forget_gate_starts_open() -> None:
    cell = CELLS["lstm"](3, 2)
    initialize_cell(cell)
    assert cell.bias_ih.tolist() == [0, 0, 1, 1, 0, 0, 0, 0] and not cell.bias_hh.any()
