"""Recurrent units, encoders and decoders, and the attention of decoders to the memory.

Units are PyTorch's LSTM and GRU cells, with products whose rows do not depend on the batch. Decoders have no attention,
attention before a step (Bahdanau et al. 2015) or after it (Luong et al. 2015).

The simpler simple recurrent unit (SSRU) stands in place of a decoder's self-attention (Kim et al. 2019, section 3).
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
"""The state of a unit, [N, H] each, float32 or wider: the hidden state, and for the LSTM the cell state."""


class LSTM(nn.LSTMCell):
    """i, f, o = sigmoid, g = tanh of the gates W x + U h; c' = f c + i g; h' = o tanh(c') (Hochreiter et al. 1997).

    Weights and equations equal those of `torch.nn.LSTMCell`.
    """

    n_states: ClassVar[int] = 2
    gate_names: ClassVar[str] = "ifgo"
    linear: Callable[..., Tensor] = staticmethod(F.linear)
    """Computes x W^T + b; a subclass may replace it by a faster function."""

    def gates(self, x: Float[Tensor, "N I"], hidden: Float[Tensor, "N H"]) -> tuple[Float[Tensor, "N H"], ...]:
        """i, f, g and o for the input x and the state before it."""
        of_input, of_state = _products(self, x, hidden)
        i, f, g, o = (of_input + of_state).chunk(4, 1)
        return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()

    def forward(self, x: Float[Tensor, "N I"], state: State) -> State:  # type: ignore[override]
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
    linear: Callable[..., Tensor] = staticmethod(F.linear)
    """Computes x W^T + b; a subclass may replace it by a faster function."""

    def gates(self, x: Float[Tensor, "N I"], hidden: Float[Tensor, "N H"]) -> tuple[Float[Tensor, "N H"], ...]:
        """r, z and n for the input x and the state before it."""
        (x_r, x_z, x_n), (h_r, h_z, h_n) = (product.chunk(3, 1) for product in _products(self, x, hidden))
        r, z = (x_r + h_r).sigmoid(), (x_z + h_z).sigmoid()
        return r, z, (x_n + r * h_n).tanh()

    def forward(self, x: Float[Tensor, "N I"], state: State) -> State:  # type: ignore[override]
        (hidden,) = state
        _, z, n = self.gates(x, hidden)
        return ((1 - z) * n + z * hidden,)


Cell = LSTM | GRU


def _products(cell: Cell, x: Float[Tensor, "N I"], hidden: Float[Tensor, "N H"]) -> tuple[Tensor, Tensor]:
    """W x + b and U h + c of all gates, in float32 or wider."""
    of_input, of_state = (cell.weight_ih, cell.bias_ih), (cell.weight_hh, cell.bias_hh)
    dtype = cell.weight_ih.dtype
    return wide(cell.linear(x.to(dtype), *of_input)), wide(cell.linear(hidden.to(dtype), *of_state))


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
    """Layers of units that read the source forward, or in both directions and concatenate the states of both.

    A backward unit starts with the last token, not with padding.
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
    """The hidden states of a unit at every token, and its last state [N, H]. At padding the state does not change."""
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

    In the paper, s is the state of the backward unit alone, without b. Each layer and part of its state has its own W.
    """

    def __init__(self, d_hidden: int, *, n_layers: int, n_states: int) -> None:
        super().__init__()
        self.parts: Any = nn.ModuleList(nn.Linear(d_hidden, n_layers * d_hidden) for _ in range(n_states))

    def forward(self, finals: Sequence[State]) -> list[State]:
        """The first state of every decoder layer."""
        width = finals[-1][0].shape[1]
        made = [
            wide(part(x.to(part.weight.dtype))).tanh().split(width, 1)
            for part, x in zip(self.parts, finals[-1], strict=True)
        ]
        return list(zip(*made, strict=True))


BRIDGES: dict[str, type[CopyBridge] | type[DenseBridge]] = {"dense": DenseBridge, "copy": CopyBridge}


# --- decoders ---------------------------------------------------------------------------------------------------------


class StateAttention(Attention):
    """context = sum_j a_j m_j with a = softmax(score(s, m_j)): one head, of the width of the memory.

    The keys depend on the memory alone and are computed once per sentence.
    """

    @abstractmethod
    def keys(self, memory: Float[Tensor, "B S H"]) -> Float[Tensor, "B S H"]:
        """The keys of the memory, which `scores` compares with decoder states; they depend on the memory alone."""

    @abstractmethod
    def scores(self, query: Float[Tensor, "B Q H"], keys: Float[Tensor, "B S H"]) -> Float[Tensor, "B Q S"]:
        """The attention scores of decoder states (`query`) for each position of the memory."""

    def weights(
        self, query: Float[Tensor, "B Q H"], keys: Tensor, memory: Float[Tensor, "B S H"], bias: Float[Tensor, "B 1 S"]
    ) -> Float[Tensor, "B 1 Q S"]:
        """The attention weights for decoder states; `bias` hides padding."""
        return (self.scores(query, keys) + bias).softmax(-1)[:, None]

    def raw_scores(self, query: Tensor, keys: Tensor, memory: Tensor, bias: Tensor) -> Float[Tensor, "B 1 Q S"]:
        return self.scores(query, keys)[:, None]

    def combine(
        self, weights: Float[Tensor, "B 1 Q S"], query: Tensor, keys: Tensor, memory: Tensor, bias: Tensor
    ) -> Float[Tensor, "B Q H"]:
        return self.matmul(weights[:, 0], memory)


class DotAttention(StateAttention):
    """score = s^T m (Luong et al. 2015, equation 8)."""

    def keys(self, memory: Tensor) -> Tensor:
        return memory

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        return self.matmul(query, keys.transpose(1, 2))


class GeneralAttention(DotAttention):
    """score = s^T W m."""

    def __init__(self, d_hidden: int) -> None:
        super().__init__()
        self.key = nn.Linear(d_hidden, d_hidden, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        return wide(self.key(memory))


class AdditiveAttention(StateAttention):
    """score = v^T tanh(W s + U m) (Bahdanau et al. 2015, A.1.2; Luong's concat)."""

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
    """Sizes of a decoder: widths of embeddings and of states, layers, the unit (a key of CELLS), dropout.

    `readout_scale`: factor of readouts (inputs of the output matrix) that tanh bounds. Without it, logits stay near 0
    for long: the output matrix begins with entries of about 1 / sqrt(d_model), as embeddings do (docs/family.md).
    """

    d_model: int
    d_hidden: int
    n_layers: int
    cell: str
    dropout: float = 0.0
    readout_scale: float = 1.0


class RecurrentDecoder(nn.Module, ABC):
    """Base of recurrent decoders: layers of units, and a readout, the vectors [N, T, D] before the output matrix."""

    def __init__(self, sizes: DecoderSizes, *, d_more: int = 0) -> None:
        """`d_more`: width of the input that the first layer reads in addition to the embedded token."""
        super().__init__()
        d, cell = sizes.d_hidden, CELLS[sizes.cell]
        layers = [cell(d if n else sizes.d_model + d_more, d) for n in range(sizes.n_layers)]
        self.layers: Any = nn.ModuleList(layers)
        self.dropout = nn.Dropout(sizes.dropout)
        self.readout_scale = sizes.readout_scale

    def start(
        self, first: Sequence[State], memory: Float[Tensor, "B S H"], mask: Bool[Tensor, "B 1 S"], *, n_beams: int
    ) -> RowState:
        """The state before the first token, from the first state [B, H] of every layer."""
        state = RowState({}, n_beams=n_beams)
        self._keep([tuple(part.repeat_interleave(n_beams, 0) for part in parts) for parts in first], state, 0)
        return state

    @abstractmethod
    def forward(self, x: Float[Tensor, "N T D"], state: RowState) -> Float[Tensor, "N T D"]:
        """The hidden states after the next T embedded tokens of every row; the state advances in place."""

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
        """Compute one step: the states of all layers after the input x."""
        new = list[State]()
        for cell, state in zip(self.layers, states, strict=True):
            new.append(cell(self.dropout(new[-1][0]) if new else x, state))
        return new

    def _hidden(self, x: Float[Tensor, "N T D"], state: RowState) -> Float[Tensor, "N T H"]:
        """The hidden states of the last layer, for decoders whose states do not depend on attention."""
        states, outputs = self._states(state), list[Tensor]()
        for now in _steps(x):
            states = self._step(now, states)
            outputs.append(states[-1][0])
        self._keep(states, state, len(outputs))
        return torch.stack(outputs, 1)


def _steps(x: Float[Tensor, "N T D"]) -> Sequence[Float[Tensor, "N D"]]:
    """The vectors of each step as contiguous tensors."""
    return x.transpose(0, 1).contiguous().unbind(0)


class PlainDecoder(RecurrentDecoder):
    """Decoder without attention: it reads the source only through its initial state (Sutskever et al. 2014).

    The readout is tanh(W s), of the width of the embeddings.
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__(sizes)
        self.readout = nn.Linear(sizes.d_hidden, sizes.d_model, bias=False)

    def forward(self, x: Float[Tensor, "N T D"], state: RowState) -> Float[Tensor, "N T D"]:
        return self._scaled(self.readout(self._hidden(x, state).to(x.dtype)).tanh())


class AttentiveDecoder(RecurrentDecoder):
    """A decoder with attention to the memory."""

    def __init__(self, sizes: DecoderSizes, attention: StateAttention, *, d_more: int = 0) -> None:
        super().__init__(sizes, d_more=d_more)
        self.attention = attention

    def start(
        self, first: Sequence[State], memory: Float[Tensor, "B S H"], mask: Bool[Tensor, "B 1 S"], *, n_beams: int
    ) -> RowState:
        """The initial state, with the memory and its keys once per sentence, which its beams share."""
        state = super().start(first, memory, mask, n_beams=n_beams)
        keys, bias = self.attention.keys(memory), attention_bias(mask)[:, 0]  # [B, 1, S]
        state.sentences = {"memory": wide(memory), "keys": wide(keys), "bias": bias}
        return state

    def _context(self, query: Float[Tensor, "N T H"], state: RowState) -> Float[Tensor, "N T H"]:
        """Attend from decoder states to the memory, which the beams of a sentence share; return the contexts."""
        kept = state.sentences
        grouped = query.unflatten(0, (-1, state.n_beams)).flatten(1, 2)  # [B, beams * T, H]
        return self.attention.attend(grouped, kept["keys"], kept["memory"], kept["bias"]).reshape(query.shape)


class LuongDecoder(AttentiveDecoder):
    """Decoder that attends with the state after each step; readout tanh(W [context; state]) (Luong et al. 2015, 3.1).

    States do not depend on attention, so all states are computed first, then all contexts at once.
    """

    def __init__(self, sizes: DecoderSizes, attention: StateAttention, *, d_more: int = 0) -> None:
        super().__init__(sizes, attention, d_more=d_more)
        self.readout = nn.Linear(2 * sizes.d_hidden, sizes.d_model, bias=False)

    def forward(self, x: Float[Tensor, "N T D"], state: RowState) -> Float[Tensor, "N T D"]:
        hidden = self._hidden(x, state)
        context = self._context(hidden, state)
        return self._scaled(self.readout(torch.cat([context, hidden], -1).to(x.dtype)).tanh())


class InputFeedingDecoder(LuongDecoder):
    """Luong's decoder with input feeding: each step also reads the readout of the previous step (3.3)."""

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
    """Decoder that attends with the state before each step; the step reads token and context (Bahdanau 2015, A.1.2).

    The readout is the maximum of each pair of entries of W [state before the step; embedding; context] (maxout, A.2.2).
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
    """SSRU: ReLU(c_t) with c_t = f_t * c_{t-1} + (1 - f_t) * W x_t, f_t = sigmoid(W_f x_t + b_f) and c_0 = 0.

    Both products depend on the inputs only, so training computes them for all positions at once. In decoding, the state
    is one vector per hypothesis, for any length. As in every linear layer here, W has a bias too.
    """

    def __init__(self, *, d_model: int, bias: bool = True) -> None:
        super().__init__()
        self.gate_value = FullProjection(d_model, (1, 1), d_head=d_model, bias=bias)

    def forward(
        self, x: Float[Tensor, "B Q D"], *, bias: Bias, rotate: Rotate, cache: LayerCache, state: DecoderState
    ) -> Float[Tensor, "B Q D"]:
        """The unit's output for the next tokens x, beam by beam. It reads and replaces the state `cache.recurrent`."""
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
    """Return c_1 to c_T of the recurrence c_t = gate_t * c_{t-1} + (1 - gate_t) * value_t, c_0 = `first`.

    Steps are computed in sequence, each for all rows at once, as in decoding.
    """
    state, states = first, list[Tensor]()
    for now, f in zip(value.unbind(1), gate.unbind(1), strict=True):
        state = torch.lerp(now, state, f)
        states.append(state)
    return torch.stack(states, 1)
