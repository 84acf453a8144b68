"""Recurrent units, encoders and decoders, and the attention of decoders to the memory.

The units are PyTorch's LSTM and GRU cells. A decoder has no attention, or attends to the memory before each step
(Bahdanau et al. 2015) or after it (Luong et al. 2015).

The simpler simple recurrent unit (SSRU) replaces a Transformer decoder's self-attention (Kim et al. 2019, section 3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.nn.attention import Attention, FullProjection
from transduce.nn.bias import Bias
from transduce.nn.dtypes import wide
from transduce.nn.masks import attention_bias
from transduce.nn.positions import Rotate
from transduce.nn.state import DecoderState, LayerCache, RowState

State = tuple[Tensor, ...]
"""The state of a unit: the hidden state [N, H] and, for an LSTM, the cell state [N, H], in float32 or wider."""


class LSTM(nn.LSTMCell):
    """Long short-term memory: c' = f c + i g; h' = o tanh(c') (Hochreiter et al. 1997).

    i, f, o = sigmoid(W x + U h + b), g = tanh(W x + U h + b), each with its own W, U and b, as in `torch.nn.LSTMCell`.
    """

    n_states: ClassVar[int] = 2
    gate_names: ClassVar[str] = "ifgo"
    linear: Callable[..., Tensor] = staticmethod(F.linear)
    """Function that computes x W^T + b; a subclass may use another implementation."""

    def gates(self, x: Float[Tensor, "N I"], hidden: Float[Tensor, "N H"]) -> tuple[Float[Tensor, "N H"], ...]:
        """Return the gates i, f, g and o of a step with the input x and the previous hidden state."""
        of_input, of_state = _products(self, x, hidden)
        i, f, g, o = (of_input + of_state).chunk(4, 1)
        return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()

    def forward(self, x: Float[Tensor, "N I"], state: State) -> State:  # type: ignore[override]
        hidden, cell = state
        i, f, g, o = self.gates(x, hidden)
        cell = f * cell + i * g
        return o * cell.tanh(), cell


class GRU(nn.GRUCell):
    """Gated recurrent unit: n = tanh(W x + r (U h)); h' = (1 - z) n + z h (Cho et al. 2014).

    The gates r and z are sigmoid(W x + U h), each with its own W and U. As in cuDNN and `torch.nn.GRUCell`, r
    multiplies the product U h; in the paper it multiplies h.
    """

    n_states: ClassVar[int] = 1
    gate_names: ClassVar[str] = "rzn"
    linear: Callable[..., Tensor] = staticmethod(F.linear)
    """Function that computes x W^T + b; a subclass may use another implementation."""

    def gates(self, x: Float[Tensor, "N I"], hidden: Float[Tensor, "N H"]) -> tuple[Float[Tensor, "N H"], ...]:
        """Return the gates r and z and the new value n of a step with the input x and the previous hidden state."""
        (x_r, x_z, x_n), (h_r, h_z, h_n) = (product.chunk(3, 1) for product in _products(self, x, hidden))
        r, z = (x_r + h_r).sigmoid(), (x_z + h_z).sigmoid()
        return r, z, (x_n + r * h_n).tanh()

    def forward(self, x: Float[Tensor, "N I"], state: State) -> State:  # type: ignore[override]
        (hidden,) = state
        _, z, n = self.gates(x, hidden)
        return ((1 - z) * n + z * hidden,)


Cell = LSTM | GRU


def _products(cell: Cell, x: Float[Tensor, "N I"], hidden: Float[Tensor, "N H"]) -> tuple[Tensor, Tensor]:
    """Return all gates' products with the input, W x + b, and with the hidden state, U h + c, in float32 or wider."""
    of_input, of_state = (cell.weight_ih, cell.bias_ih), (cell.weight_hh, cell.bias_hh)
    dtype = cell.weight_ih.dtype
    return wide(cell.linear(x.to(dtype), *of_input)), wide(cell.linear(hidden.to(dtype), *of_state))


CELLS: dict[str, type[Cell]] = {"lstm": LSTM, "gru": GRU}


@torch.no_grad()
def initialize_cell(cell: Cell) -> None:
    """Initialize a unit: Glorot-uniform W, orthogonal U (Bahdanau et al. 2015, B.1), zero biases.

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
"""For each direction of an encoder, one bool per unit of a layer: whether the unit reads from the end."""


class RecurrentEncoder(nn.Module):
    """Layers of recurrent units that read the source in one direction, or in both with the states concatenated.

    A backward unit starts with the last token that is not padding.
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
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "N S D"], mask: Bool[Tensor, "N 1 S"]
    ) -> tuple[Float[Tensor, "N S H"], list[State]]:
        """Return the last layer's hidden state at every token, and every layer's final state. Padding is masked out."""
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
    """Run a unit over a batch; return its hidden state at every token and its final state. Padding is skipped."""
    state: State = (wide(x).new_zeros(x.shape[1], cell.hidden_size),) * cell.n_states
    steps, outputs = list(zip(x.unbind(0), real.unbind(0), strict=True)), list[Tensor]()
    for now, is_real in reversed(steps) if reverse else steps:
        state = tuple(torch.where(is_real, new, old) for new, old in zip(cell(now, state), state, strict=True))
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if reverse else outputs), state


class CopyBridge(nn.Module):
    """Initialize layer l of the decoder with the final state of layer l of the encoder (Sutskever et al. 2014)."""

    def __init__(self, d_hidden: int, *, n_layers: int, n_states: int) -> None:
        super().__init__()

    def forward(self, finals: Sequence[State]) -> list[State]:
        """Return the initial state of every decoder layer; `finals`: the final state of every encoder layer."""
        return list(finals)


class DenseBridge(nn.Module):
    """Initialize the decoder with tanh(W s + b), s being the final state of the encoder's last layer (Bahdanau, A.2.2).

    Each decoder layer and each part of its state has its own W. The paper uses the backward unit's state, and no b.
    """

    def __init__(self, d_hidden: int, *, n_layers: int, n_states: int) -> None:
        super().__init__()
        self.parts: Any = nn.ModuleList(nn.Linear(d_hidden, n_layers * d_hidden) for _ in range(n_states))

    def forward(self, finals: Sequence[State]) -> list[State]:
        """Return the initial state of every decoder layer; `finals`: the final state of every encoder layer."""
        width = finals[-1][0].shape[1]
        made = [
            wide(part(x.to(part.weight.dtype))).tanh().split(width, 1)
            for part, x in zip(self.parts, finals[-1], strict=True)
        ]
        return list(zip(*made, strict=True))


BRIDGES: dict[str, type[CopyBridge] | type[DenseBridge]] = {"dense": DenseBridge, "copy": CopyBridge}


# --- decoders ---------------------------------------------------------------------------------------------------------


class StateAttention(Attention):
    """Attention of a recurrent decoder's state s to the memory m, with a single head.

    context = sum_j a_j m_j with a = softmax_j(score(s, m_j)). Keys depend only on the memory and are computed once per
    sentence.
    """

    @abstractmethod
    def keys(self, memory: Float[Tensor, "B S H"]) -> Float[Tensor, "B S H"]:
        """Compute the keys of a memory, from which `scores` computes the scores of any state."""

    @abstractmethod
    def scores(self, query: Float[Tensor, "B Q H"], keys: Float[Tensor, "B S H"]) -> Float[Tensor, "B Q S"]:
        """Compute the scores of decoder states (`query`) with keys from `keys`."""

    def weights(
        self, query: Float[Tensor, "B Q H"], keys: Tensor, memory: Float[Tensor, "B S H"], bias: Float[Tensor, "B 1 S"]
    ) -> Float[Tensor, "B 1 Q S"]:
        """Return the attention weights of decoder states (`query`); `bias` hides padding."""
        return (self.scores(query, keys) + bias).softmax(-1)[:, None]

    def raw_scores(self, query: Tensor, keys: Tensor, memory: Tensor, bias: Tensor) -> Float[Tensor, "B 1 Q S"]:
        return self.scores(query, keys)[:, None]

    def combine(
        self, weights: Float[Tensor, "B 1 Q S"], query: Tensor, keys: Tensor, memory: Tensor, bias: Tensor
    ) -> Float[Tensor, "B Q H"]:
        return self.matmul(weights[:, 0], memory)


class DotAttention(StateAttention):
    """Dot-product attention to the memory: score = s^T m (Luong et al. 2015, equation 8)."""

    def keys(self, memory: Tensor) -> Tensor:
        return memory

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        return self.matmul(query, keys.transpose(1, 2))


class GeneralAttention(DotAttention):
    """Bilinear attention to the memory: score = s^T W m (Luong et al. 2015, equation 8, general)."""

    def __init__(self, d_hidden: int) -> None:
        super().__init__()
        self.key = nn.Linear(d_hidden, d_hidden, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        return wide(self.key(memory))


class AdditiveAttention(StateAttention):
    """Additive attention: score = v^T tanh(W s + U m) (Bahdanau et al. 2015, A.1.2; "concat" in Luong et al. 2015)."""

    def __init__(self, d_hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(d_hidden, d_hidden, bias=False)
        self.key = nn.Linear(d_hidden, d_hidden)
        self.score = nn.Linear(d_hidden, 1, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        return wide(self.key(memory))

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        projected = wide(self.query(query.to(self.query.weight.dtype)))
        hidden = torch.tanh(projected[:, :, None] + keys[:, None])  # [B, Q, S, H]
        return hidden @ wide(self.score.weight)[0]


SCORES: dict[str, Callable[[int], StateAttention]] = {
    "dot": lambda d_hidden: DotAttention(),
    "general": GeneralAttention,
    "concat": AdditiveAttention,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """Sizes of a recurrent decoder; `cell` is "lstm" or "gru", `d_hidden` the width of its states.

    `readout_scale` multiplies readouts that tanh bounds. The output matrix is initialized like the embeddings, with
    entries of about 1 / sqrt(d_model); the logits of a bounded readout would stay near 0 until the matrix has grown
    (docs/family.md).
    """

    d_model: int
    d_hidden: int
    n_layers: int
    cell: str
    dropout: float = 0.0
    readout_scale: float = 1.0


class RecurrentDecoder(nn.Module, ABC):
    """Layers of recurrent units, whose states become a readout: the vectors [N, T, D] that enter the output matrix."""

    def __init__(self, sizes: DecoderSizes, *, d_more: int = 0) -> None:
        """`d_more`: width of the vector that the first layer reads in addition to the embedded token."""
        super().__init__()
        d, cell = sizes.d_hidden, CELLS[sizes.cell]
        layers = [cell(d if n else sizes.d_model + d_more, d) for n in range(sizes.n_layers)]
        self.layers: Any = nn.ModuleList(layers)
        self.dropout = nn.Dropout(sizes.dropout)
        self.readout_scale = sizes.readout_scale

    def start(
        self, first: Sequence[State], memory: Float[Tensor, "B S H"], mask: Bool[Tensor, "B 1 S"], *, n_beams: int
    ) -> RowState:
        """Return the state before the first token. `first`: the initial state [B, H] of every layer, from a bridge."""
        state = RowState({}, n_beams=n_beams)
        self._keep([tuple(part.repeat_interleave(n_beams, 0) for part in parts) for parts in first], state, 0)
        return state

    @abstractmethod
    def forward(self, x: Float[Tensor, "N T D"], state: RowState) -> Float[Tensor, "N T D"]:
        """Return the readouts after each of the next T embedded tokens of every row; `state` is updated in place."""

    def _states(self, state: RowState) -> list[State]:
        return [tuple(state.rows[f"{n}.{k}"] for k in range(cell.n_states)) for n, cell in enumerate(self.layers)]

    @staticmethod
    def _keep(states: Sequence[State], state: RowState, n_steps: int) -> None:
        state.length += n_steps
        state.rows |= {f"{n}.{k}": part for n, parts in enumerate(states) for k, part in enumerate(parts)}

    def _scaled(self, readout: Float[Tensor, "N T D"]) -> Float[Tensor, "N T D"]:
        """Apply dropout to a readout bounded by tanh, and multiply it by `readout_scale`."""
        return self.dropout(readout) * self.readout_scale

    def _step(self, x: Float[Tensor, "N I"], states: Sequence[State]) -> list[State]:
        """Return the states of all layers after one step with the input x."""
        new = list[State]()
        for cell, state in zip(self.layers, states, strict=True):
            new.append(cell(self.dropout(new[-1][0]) if new else x, state))
        return new

    def _hidden(self, x: Float[Tensor, "N T D"], state: RowState) -> Float[Tensor, "N T H"]:
        """Return the last layer's hidden states after each token, for decoders whose states do not use attention."""
        states, outputs = self._states(state), list[Tensor]()
        for now in _steps(x):
            states = self._step(now, states)
            outputs.append(states[-1][0])
        self._keep(states, state, len(outputs))
        return torch.stack(outputs, 1)


def _steps(x: Float[Tensor, "N T D"]) -> Sequence[Float[Tensor, "N D"]]:
    """Split a batch into one contiguous tensor [N, D] per step."""
    return x.transpose(0, 1).contiguous().unbind(0)


class PlainDecoder(RecurrentDecoder):
    """Recurrent decoder without attention: it sees the source only in its initial state (Sutskever et al. 2014).

    Its readout is tanh(W s) for the hidden state s.
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__(sizes)
        self.readout = nn.Linear(sizes.d_hidden, sizes.d_model, bias=False)

    def forward(self, x: Float[Tensor, "N T D"], state: RowState) -> Float[Tensor, "N T D"]:
        return self._scaled(self.readout(self._hidden(x, state).to(x.dtype)).tanh())


class AttentiveDecoder(RecurrentDecoder):
    """Base of recurrent decoders with attention to the memory."""

    def __init__(self, sizes: DecoderSizes, attention: StateAttention, *, d_more: int = 0) -> None:
        super().__init__(sizes, d_more=d_more)
        self.attention = attention

    def start(
        self, first: Sequence[State], memory: Float[Tensor, "B S H"], mask: Bool[Tensor, "B 1 S"], *, n_beams: int
    ) -> RowState:
        """Return the state before the first token. All beams of a sentence share the memory and its keys."""
        state = super().start(first, memory, mask, n_beams=n_beams)
        keys, bias = self.attention.keys(memory), attention_bias(mask)[:, 0]  # [B, 1, S]
        state.sentences = {"memory": wide(memory), "keys": wide(keys), "bias": bias}
        return state

    def _context(self, query: Float[Tensor, "N T H"], state: RowState) -> Float[Tensor, "N T H"]:
        """Return the context (weighted sum of the memory) of each hidden state in `query`."""
        kept = state.sentences
        grouped = query.unflatten(0, (-1, state.n_beams)).flatten(1, 2)  # [B, beams * T, H]
        return self.attention.attend(grouped, kept["keys"], kept["memory"], kept["bias"]).reshape(query.shape)


class LuongDecoder(AttentiveDecoder):
    """Recurrent decoder that attends to the memory after each step (Luong et al. 2015, 3.1).

    The readout is tanh(W [context; state]). States do not depend on attention, so all states are computed first, then
    all contexts at once.
    """

    def __init__(self, sizes: DecoderSizes, attention: StateAttention, *, d_more: int = 0) -> None:
        super().__init__(sizes, attention, d_more=d_more)
        self.readout = nn.Linear(2 * sizes.d_hidden, sizes.d_model, bias=False)

    def forward(self, x: Float[Tensor, "N T D"], state: RowState) -> Float[Tensor, "N T D"]:
        hidden = self._hidden(x, state)
        context = self._context(hidden, state)
        return self._scaled(self.readout(torch.cat([context, hidden], -1).to(x.dtype)).tanh())


class InputFeedingDecoder(LuongDecoder):
    """Luong's decoder with input feeding: each step also reads the previous step's readout (Luong et al. 2015, 3.3)."""

    def __init__(self, sizes: DecoderSizes, attention: StateAttention) -> None:
        super().__init__(sizes, attention, d_more=sizes.d_model)

    def start(
        self, first: Sequence[State], memory: Float[Tensor, "B S H"], mask: Bool[Tensor, "B 1 S"], *, n_beams: int
    ) -> RowState:
        state = super().start(first, memory, mask, n_beams=n_beams)
        state.rows["feed"] = wide(memory).new_zeros(state.n_rows, self.readout.out_features)
        return state

    def forward(self, x: Float[Tensor, "N T D"], state: RowState) -> Float[Tensor, "N T D"]:
        states, feed, outputs = self._states(state), state.rows["feed"], list[Tensor]()
        for now in _steps(x):
            states = self._step(torch.cat([now, feed], -1), states)
            hidden = states[-1][0]
            context = self._context(hidden[:, None], state)[:, 0]
            read = torch.cat([context, hidden], -1).to(self.readout.weight.dtype)
            feed = wide(self.readout(read)).tanh()
            outputs.append(feed)
        self._keep(states, state, len(outputs))
        state.rows["feed"] = feed
        return self._scaled(torch.stack(outputs, 1).to(x.dtype))


class BahdanauDecoder(AttentiveDecoder):
    """Recurrent decoder that attends to the memory before each step (Bahdanau et al. 2015, A.1.2).

    The step reads the context beside the embedded token. The readout is maxout, the maximum of pairs of columns, of
    W [state before the step; embedding; context] (A.2.2).
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        d = sizes.d_hidden
        super().__init__(sizes, AdditiveAttention(d), d_more=d)
        self.readout = nn.Linear(2 * d + sizes.d_model, 2 * sizes.d_model)

    def forward(self, x: Float[Tensor, "N T D"], state: RowState) -> Float[Tensor, "N T D"]:
        states, read = self._states(state), list[Tensor]()
        for now in _steps(x):
            before = states[-1][0]
            context = self._context(before[:, None], state)[:, 0]
            read.append(torch.cat([before, context], -1))
            states = self._step(torch.cat([now, context], -1), states)
        self._keep(states, state, len(read))
        pairs = self.readout(torch.cat([torch.stack(read, 1).to(x.dtype), x], -1))
        return self.dropout(torch.maximum(*pairs.chunk(2, -1)))


class SSRU(nn.Module):
    """Simpler simple recurrent unit (Kim et al. 2019), which replaces a decoder's self-attention.

    Its output is ReLU(c_t) with c_t = f_t * c_{t-1} + (1 - f_t) * W x_t, f_t = sigmoid(W_f x_t + b_f) and c_0 = 0. Here
    W has a bias as well. Both products depend only on the inputs, so training computes them for all positions at once.
    In decoding, the state is one vector per hypothesis, for any length.
    """

    def __init__(self, *, d_model: int, bias: bool = True) -> None:
        super().__init__()
        self.gate_value = FullProjection(d_model, (1, 1), d_head=d_model, bias=bias)

    def forward(
        self, x: Float[Tensor, "B Q D"], *, bias: Bias, rotate: Rotate, cache: LayerCache, state: DecoderState
    ) -> Float[Tensor, "B Q D"]:
        """Apply the unit to the next tokens x, ordered beam by beam, and update the state `cache.recurrent`.

        `bias` and `rotate` are arguments of self-attention, not used here.
        """
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
    """Compute c_1 .. c_T step by step: c_t = gate_t * c_{t-1} + (1 - gate_t) * value_t with c_0 = `first`."""
    state, states = first, list[Tensor]()
    for now, f in zip(value.unbind(1), gate.unbind(1), strict=True):
        state = torch.lerp(now, state, f)
        states.append(state)
    return torch.stack(states, 1)
