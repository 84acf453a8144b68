"""Units compared with `torch.nn.LSTMCell` and `GRUCell`; the scan of the SSRU and its definition; bfloat16."""

import pytest
import torch
from torch import Tensor, nn

from transduce.nn.recurrent import CELLS, SSRU, Cell, State, initialize_cell, scan
from transduce.nn.state import DecoderState, LayerCache

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


def inputs(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gate, value = (torch.randn(*shape, generator=generator, dtype=dtype) for _ in range(2))
    return gate.sigmoid(), value, torch.randn(shape[0], shape[2], generator=generator, dtype=dtype)


def by_definition(gate: Tensor, value: Tensor, first: Tensor) -> Tensor:
    states = [first]
    for t in range(gate.shape[1]):
        states.append(gate[:, t] * states[-1] + (1 - gate[:, t]) * value[:, t])
    return torch.stack(states[1:], 1)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (2, 40, 3)])
def test_the_scan_is_its_definition(shape: tuple[int, ...]) -> None:
    given = inputs(*shape)
    torch.testing.assert_close(scan(*given), by_definition(*given))


def test_closed_and_open_gates() -> None:
    _, value, first = inputs(2, 4, 3)
    assert torch.equal(scan(torch.zeros_like(value), value, first), value)
    assert torch.equal(scan(torch.ones_like(value), value, first), first[:, None].expand_as(value))


def test_token_by_token_is_bit_identical_to_the_whole_sequence() -> None:
    """With whole vector registers, as in any usual width; else PyTorch may round the last few numbers differently."""
    torch.manual_seed(0)
    unit, x = SSRU(d_model=32).double().eval(), torch.randn(6, 9, 32, dtype=torch.float64)

    def state(n_beams: int) -> DecoderState:
        return DecoderState(layers=[], memory_bias=torch.zeros(6 // n_beams, 1, 1, 1), n_beams=n_beams)

    with torch.no_grad():
        products = [part.squeeze(1) for part in unit.gate_value(x)]
        whole = scan(products[0].sigmoid(), products[1], torch.zeros(6, 32, dtype=torch.float64))
        parts, last = [], torch.zeros(6, 32, dtype=torch.float64)
        for t in range(9):
            parts.append(scan(products[0][:, t : t + 1].sigmoid(), products[1][:, t : t + 1], last))
            last = parts[-1][:, -1]
        assert torch.equal(torch.cat(parts, 1), whole)
        cache = LayerCache(keys=None, values=None)
        steps = []
        for t in range(9):  # three beams of two sentences
            now = x[:, t].view(2, 3, 32)
            steps.append(unit(now, bias=None, rotate=lambda y: y, cache=cache, state=state(3)).view(6, 32))
        torch.testing.assert_close(torch.stack(steps, 1), whole.relu(), rtol=0, atol=1e-12)


def test_the_scan_in_bfloat16_has_a_float32_state() -> None:
    torch.manual_seed(0)
    unit, x = SSRU(d_model=32), torch.randn(3, 50, 32)
    given = {"bias": None, "rotate": lambda y: y}
    state = DecoderState(layers=[], memory_bias=torch.zeros(3, 1, 1, 1))
    exact, cache = unit(x, **given, cache=LayerCache(None, None), state=state), LayerCache(None, None)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = unit(x, **given, cache=cache, state=state)
    assert rounded.dtype == torch.float32 and cache.recurrent is not None and cache.recurrent.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0.05)
