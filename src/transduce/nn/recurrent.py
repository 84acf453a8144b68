"""Recurrent units: PyTorch's LSTM and GRU cells, with products whose rows do not depend on the batch."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transduce.nn.linear import wide_linear

State = tuple[Tensor, ...]
"""The state of a unit, [N, H] each, float32 or wider: the hidden state, and for the LSTM the cell state."""


class LSTM(nn.LSTMCell):
    """i, f, o = sigmoid, g = tanh of the gates W x + U h; c' = f c + i g; h' = o tanh(c') (Hochreiter et al. 1997).

    The weights and equations are those of `torch.nn.LSTMCell`, whose products on a CPU depend on the number of rows.
    """

    n_states: ClassVar[int] = 2

    def forward(self, x: Float[Tensor, "N I"], state: State) -> State:  # type: ignore[override]
        """The state after the input x."""
        hidden, cell = state
        inputs = wide_linear(x, self.weight_ih, self.bias_ih)
        i, f, g, o = (inputs + wide_linear(hidden, self.weight_hh, self.bias_hh)).chunk(4, 1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        return o.sigmoid() * cell.tanh(), cell


class GRU(nn.GRUCell):
    """r, z = sigmoid of the gates; n = tanh(W x + r (U h)); h' = (1 - z) n + z h (Cho et al. 2014).

    As in cuDNN and `torch.nn.GRUCell`, r multiplies the product U h; in the paper it multiplies h.
    """

    n_states: ClassVar[int] = 1

    def forward(self, x: Float[Tensor, "N I"], state: State) -> State:  # type: ignore[override]
        """The state after the input x."""
        (hidden,) = state
        x_r, x_z, x_n = wide_linear(x, self.weight_ih, self.bias_ih).chunk(3, 1)
        h_r, h_z, h_n = wide_linear(hidden, self.weight_hh, self.bias_hh).chunk(3, 1)
        r, z = (x_r + h_r).sigmoid(), (x_z + h_z).sigmoid()
        n = (x_n + r * h_n).tanh()
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
