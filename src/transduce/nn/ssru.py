"""The simpler simple recurrent unit (SSRU), in place of a decoder's self-attention (Kim et al. 2019, section 3)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.nn.attention import FullProjection
from transduce.nn.bias import Bias
from transduce.nn.dtypes import wide
from transduce.nn.positions import Rotate
from transduce.nn.state import DecoderState, LayerCache


class SSRU(nn.Module):
    """ReLU(c_t) with c_t = f_t * c_{t-1} + (1 - f_t) * W x_t and f_t = sigmoid(W_f x_t + b_f); c_0 = 0.

    Both products depend on the inputs only, so training computes them for all positions at once. In decoding, the state
    is one vector per hypothesis, for any length. As in every linear layer here, W has a bias too.
    """

    def __init__(self, *, d_model: int, bias: bool = True) -> None:
        super().__init__()
        self.gate_value = FullProjection(d_model, (1, 1), d_head=d_model, bias=bias)

    def forward(
        self, x: Float[Tensor, "B Q D"], *, bias: Bias, rotate: Rotate, cache: LayerCache, state: DecoderState
    ) -> Float[Tensor, "B Q D"]:
        """The next tokens x, beam by beam, after the unit; continues from `cache.recurrent` and replaces it."""
        rows = x.reshape(state.n_rows, -1, x.shape[2])  # [N, T, D]
        gate, value = (part.squeeze(1) for part in self.gate_value(rows))
        gate, value = wide(gate).sigmoid(), wide(value)
        first = value.new_zeros(value[:, 0].shape) if cache.recurrent is None else cache.recurrent
        states = scan(gate, value, first)
        cache.recurrent = states[:, -1]
        return F.relu(states).reshape(x.shape)


def scan(
    gate: Float[Tensor, "N T D"], value: Float[Tensor, "N T D"], first: Float[Tensor, "N D"]
) -> Float[Tensor, "N T D"]:
    """c_1 .. c_T with c_t = gate_t * c_{t-1} + (1 - gate_t) * value_t and c_0 = `first`.

    Steps are computed in sequence, each for all rows at once, as in decoding.
    """
    state, states = first, list[Tensor]()
    for now, f in zip(value.unbind(1), gate.unbind(1), strict=True):
        state = torch.lerp(now, state, f)
        states.append(state)
    return torch.stack(states, 1)
