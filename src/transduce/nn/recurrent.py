"""Recurrent units and encoders: PyTorch's LSTM and GRU cells, with products whose rows do not depend on the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from transduce.nn.dropout import Dropout
from transduce.nn.linear import Linear, wide, wide_linear

State = tuple[Tensor, ...]
"""The state of a unit, [N, H] each, float32 or wider: the hidden state, and for the LSTM the cell state."""


class LSTM(nn.LSTMCell):
    """i, f, o = sigmoid, g = tanh of the gates W x + U h; c' = f c + i g; h' = o tanh(c') (Hochreiter et al. 1997).

    The weights and equations are those of `torch.nn.LSTMCell`, whose products on a CPU depend on the number of rows.
    """

    n_states: ClassVar[int] = 2
    gate_names: ClassVar[str] = "ifgo"

    def gates(self, x: Float[Tensor, "N I"], hidden: Float[Tensor, "N H"]) -> tuple[Float[Tensor, "N H"], ...]:
        """i, f, g and o for the input x and the state before it."""
        inputs = wide_linear(x, self.weight_ih, self.bias_ih)
        i, f, g, o = (inputs + wide_linear(hidden, self.weight_hh, self.bias_hh)).chunk(4, 1)
        return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()

    def forward(self, x: Float[Tensor, "N I"], state: State) -> State:  # type: ignore[override]
        """The state after the input x."""
        hidden, cell = state
        i, f, g, o = self.gates(x, hidden)
        cell = f * cell + i * g
        return o * cell.tanh(), cell


class GRU(nn.GRUCell):
    """r, z = sigmoid of the gates; n = tanh(W x + r (U h)); h' = (1 - z) n + z h (Cho et al. 2014).

    As in cuDNN and `torch.nn.GRUCell`, r multiplies the product U h; in the paper it multiplies h.
    """

    n_states: ClassVar[int] = 1
    gate_names: ClassVar[str] = "rzn"

    def gates(self, x: Float[Tensor, "N I"], hidden: Float[Tensor, "N H"]) -> tuple[Float[Tensor, "N H"], ...]:
        """r, z and n for the input x and the state before it."""
        x_r, x_z, x_n = wide_linear(x, self.weight_ih, self.bias_ih).chunk(3, 1)
        h_r, h_z, h_n = wide_linear(hidden, self.weight_hh, self.bias_hh).chunk(3, 1)
        r, z = (x_r + h_r).sigmoid(), (x_z + h_z).sigmoid()
        return r, z, (x_n + r * h_n).tanh()

    def forward(self, x: Float[Tensor, "N I"], state: State) -> State:  # type: ignore[override]
        """The state after the input x."""
        (hidden,) = state
        _, z, n = self.gates(x, hidden)
        return ((1 - z) * n + z * hidden,)


Cell = LSTM | GRU
CELLS: dict[str, type[Cell]] = {"lstm": LSTM, "gru": GRU}


@torch.no_grad()
def initialize_cell(cell: Cell) -> None:
    """Draw Glorot-uniform matrices, orthogonal ones from state to state (Bahdanau et al. 2015, B.1), zero biases.

    The forget gate of an LSTM has a bias of 1 (Jozefowicz et al. 2015).
    """
    n = cell.hidden_size
    for of_input, of_state in zip(cell.weight_ih.split(n), cell.weight_hh.split(n), strict=True):
        nn.init.xavier_uniform_(of_input)
        nn.init.orthogonal_(of_state)
    nn.init.zeros_(cell.bias_ih)
    nn.init.zeros_(cell.bias_hh)
    if isinstance(cell, LSTM):
        cell.bias_ih[n : 2 * n] = 1.0


DIRECTIONS: dict[str, tuple[bool, ...]] = {"both": (False, True), "forward": (False,), "backward": (True,)}
"""Whether each of an encoder's units reads from the end."""


class RecurrentEncoder(nn.Module):
    """Layers of units that read the source in one direction or in both; then their states are concatenated.

    A unit that reads from the end starts with the last token, whatever the padding.
    """

    def __init__(
        self, *, d_model: int, d_hidden: int, n_layers: int, cell: str, direction: str, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.reverse = DIRECTIONS[direction]
        width = d_hidden // len(self.reverse)
        self.layers: Any = nn.ModuleList(
            nn.ModuleList(CELLS[cell](d_hidden if n else d_model, width) for _ in self.reverse) for n in range(n_layers)
        )
        self.dropout = Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "N S D"], mask: Bool[Tensor, "N 1 S"]
    ) -> tuple[Float[Tensor, "N S H"], list[State]]:
        """The states of the last layer at every token, and the last states [N, H] of every layer."""
        x, real = x.transpose(0, 1).contiguous(), mask.permute(2, 0, 1)  # [S, N, D], [S, N, 1]
        finals = []
        for n, layer in enumerate(self.layers):
            x = self.dropout(x) if n else x
            units = [
                _read(cell, x, real, reverse=is_reverse) for cell, is_reverse in zip(layer, self.reverse, strict=True)
            ]
            x = torch.cat([hidden for hidden, _ in units], -1).to(x.dtype)
            finals.append(tuple(torch.cat(parts, -1) for parts in zip(*(final for _, final in units), strict=True)))
        return x.transpose(0, 1).contiguous(), finals


def _read(
    cell: Cell, x: Float[Tensor, "S N D"], real: Bool[Tensor, "S N 1"], *, reverse: bool
) -> tuple[Float[Tensor, "S N H"], State]:
    """The hidden states of a unit at every token, and its last state [N, H]. At padding the state stays as it is."""
    state: State = (wide(x).new_zeros(x.shape[1], cell.hidden_size),) * cell.n_states
    steps, outputs = list(zip(x.unbind(0), real.unbind(0), strict=True)), list[Tensor]()
    for now, is_real in reversed(steps) if reverse else steps:
        state = tuple(torch.where(is_real, new, old) for new, old in zip(cell(now, state), state, strict=True))
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if reverse else outputs), state


class CopyBridge(nn.Module):
    """Layer l of the decoder starts with the last state of layer l of the encoder (Sutskever et al. 2014)."""

    def __init__(self, d_hidden: int, *, n_layers: int, n_states: int) -> None:
        super().__init__()

    def forward(self, finals: Sequence[State]) -> list[State]:
        """The first state of every decoder layer."""
        return list(finals)


class DenseBridge(nn.Module):
    """The decoder starts with tanh(W s + b) of the last state s of the encoder's last layer (Bahdanau, A.2.2).

    In the paper, s is the state of the backward unit alone, without b. One W for each layer and each part of its state.
    """

    def __init__(self, d_hidden: int, *, n_layers: int, n_states: int) -> None:
        super().__init__()
        self.parts: Any = nn.ModuleList(Linear(d_hidden, n_layers * d_hidden) for _ in range(n_states))

    def forward(self, finals: Sequence[State]) -> list[State]:
        """The first state of every decoder layer."""
        width = finals[-1][0].shape[1]
        made = [
            wide_linear(x, part.weight, part.bias).tanh().split(width, 1)
            for part, x in zip(self.parts, finals[-1], strict=True)
        ]
        return list(zip(*made, strict=True))


BRIDGES: dict[str, type[CopyBridge] | type[DenseBridge]] = {"dense": DenseBridge, "copy": CopyBridge}
