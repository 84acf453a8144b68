"""Recurrent decoders and their attention to the memory.

Without attention, with attention before a step (Bahdanau et al. 2015) and after it (Luong et al. 2015).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from transduce.nn.attention import Attention, softmax_over_keys
from transduce.nn.dropout import Dropout
from transduce.nn.linear import Linear, batched_product, wide, wide_linear
from transduce.nn.masks import attention_bias
from transduce.nn.recurrent import CELLS, State
from transduce.nn.state import RowState


class StateAttention(Attention):
    """context = sum_j a_j m_j with a = softmax(score(s, m_j)): one head, of the width of the memory.

    What depends on the memory alone is computed once per sentence: the keys.
    """

    def __init__(self, d_hidden: int) -> None:
        super().__init__()
        self.d_hidden = d_hidden

    @abstractmethod
    def keys(self, memory: Float[Tensor, "B S H"]) -> Float[Tensor, "B S H"]:
        """Parts of the memory that scores need."""

    @abstractmethod
    def scores(self, query: Float[Tensor, "B Q H"], keys: Float[Tensor, "B S H"]) -> Float[Tensor, "B Q S"]:
        """The scores of states."""

    def weights(
        self, query: Float[Tensor, "B Q H"], keys: Tensor, memory: Float[Tensor, "B S H"], bias: Float[Tensor, "B 1 S"]
    ) -> Float[Tensor, "B 1 Q S"]:
        """The weights of states; `bias` hides padding."""
        return softmax_over_keys(self.scores(query, keys) + bias)[:, None]

    def raw_scores(self, query: Tensor, keys: Tensor, memory: Tensor, bias: Tensor) -> Float[Tensor, "B 1 Q S"]:
        return self.scores(query, keys)[:, None]

    def combine(
        self, weights: Float[Tensor, "B 1 Q S"], query: Tensor, keys: Tensor, memory: Tensor, bias: Tensor
    ) -> Float[Tensor, "B Q H"]:
        return batched_product(weights[:, 0], memory)


class DotAttention(StateAttention):
    """score = s^T m (Luong et al. 2015, equation 8)."""

    def keys(self, memory: Tensor) -> Tensor:
        return memory

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        return batched_product(query, keys.transpose(1, 2))


class GeneralAttention(DotAttention):
    """score = s^T W m."""

    def __init__(self, d_hidden: int) -> None:
        super().__init__(d_hidden)
        self.key = Linear(d_hidden, d_hidden, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        return wide(self.key(memory))


class AdditiveAttention(StateAttention):
    """score = v^T tanh(W s + U m) (Bahdanau et al. 2015, A.1.2; Luong's concat)."""

    def __init__(self, d_hidden: int) -> None:
        super().__init__(d_hidden)
        self.query = Linear(d_hidden, d_hidden, bias=False)
        self.key = Linear(d_hidden, d_hidden)
        self.score = Linear(d_hidden, 1, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        return wide(self.key(memory))

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        projected = wide_linear(query, self.query.weight, None)
        hidden = torch.tanh(projected[:, :, None] + keys[:, None])  # [B, Q, S, H]
        return hidden @ wide(self.score.weight)[0]


SCORES: dict[str, type[StateAttention]] = {
    "dot": DotAttention,
    "general": GeneralAttention,
    "concat": AdditiveAttention,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """Sizes of a decoder: widths of embeddings and of states, layers, the unit (a key of CELLS), dropout.

    `readout_scale` multiplies readouts that tanh bounds. The output matrix has entries of 1 / sqrt(d_model), as the
    embeddings do, so that the logits of a bounded readout stay near 0 until the matrix has grown (docs/family.md).
    """

    d_model: int
    d_hidden: int
    n_layers: int
    cell: str
    dropout: float = 0.0
    readout_scale: float = 1.0


class RecurrentDecoder(nn.Module, ABC):
    """Layers of units, with a readout: the hidden states [N, T, D] before the output matrix."""

    def __init__(self, sizes: DecoderSizes, *, d_more: int = 0) -> None:
        """`d_more`: width of what the first layer reads beside the embedded token."""
        super().__init__()
        d, cell = sizes.d_hidden, CELLS[sizes.cell]
        layers = [cell(d if n else sizes.d_model + d_more, d) for n in range(sizes.n_layers)]
        self.layers: Any = nn.ModuleList(layers)
        self.dropout = Dropout(sizes.dropout)
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
        """A bounded readout as the output matrix takes it."""
        return self.dropout(readout) * self.readout_scale

    def _step(self, x: Float[Tensor, "N I"], states: Sequence[State]) -> list[State]:
        """The states of all layers after the input x."""
        new = list[State]()
        for cell, state in zip(self.layers, states, strict=True):
            new.append(cell(self.dropout(new[-1][0]) if new else x, state))
        return new

    def _hidden(self, x: Float[Tensor, "N T D"], state: RowState) -> Float[Tensor, "N T H"]:
        """The hidden states of the last layer, where no step depends on attention."""
        states, outputs = self._states(state), list[Tensor]()
        for now in _steps(x):
            states = self._step(now, states)
            outputs.append(states[-1][0])
        self._keep(states, state, len(outputs))
        return torch.stack(outputs, 1)


def _steps(x: Float[Tensor, "N T D"]) -> Sequence[Float[Tensor, "N D"]]:
    """The vectors of each step, contiguous."""
    return x.transpose(0, 1).contiguous().unbind(0)


class PlainDecoder(RecurrentDecoder):
    """No attention: all that the decoder knows of the source is its first state (Sutskever et al. 2014).

    The readout is tanh(W s), of the width of the embeddings.
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__(sizes)
        self.readout = Linear(sizes.d_hidden, sizes.d_model, bias=False)

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
        """The memory and its keys are computed once per sentence."""
        state = super().start(first, memory, mask, n_beams=n_beams)
        keys, bias = self.attention.keys(memory), attention_bias(mask)[:, 0]  # [B, 1, S]
        state.sentences = {"memory": wide(memory), "keys": wide(keys), "bias": bias}
        return state

    def _context(self, query: Float[Tensor, "N T H"], state: RowState) -> Float[Tensor, "N T H"]:
        """The contexts of states; the beams of a sentence share its memory."""
        kept = state.sentences
        grouped = query.unflatten(0, (-1, state.n_beams)).flatten(1, 2)  # [B, beams * T, H]
        return self.attention.attend(grouped, kept["keys"], kept["memory"], kept["bias"]).reshape(query.shape)


class LuongDecoder(AttentiveDecoder):
    """Attention of the state after the step; the readout is tanh(W [context; state]) (Luong et al. 2015, 3.1).

    No step depends on attention: all states come first, then all contexts at once.
    """

    def __init__(self, sizes: DecoderSizes, attention: StateAttention, *, d_more: int = 0) -> None:
        super().__init__(sizes, attention, d_more=d_more)
        self.readout = Linear(2 * sizes.d_hidden, sizes.d_model, bias=False)

    def forward(self, x: Float[Tensor, "N T D"], state: RowState) -> Float[Tensor, "N T D"]:
        hidden = self._hidden(x, state)
        context = self._context(hidden, state)
        return self._scaled(self.readout(torch.cat([context, hidden], -1).to(x.dtype)).tanh())


class InputFeedingDecoder(LuongDecoder):
    """Luong's decoder, in which each step reads the readout of the one before beside the token (3.3)."""

    def __init__(self, sizes: DecoderSizes, attention: StateAttention) -> None:
        super().__init__(sizes, attention, d_more=sizes.d_model)

    def start(
        self, first: Sequence[State], memory: Float[Tensor, "B S H"], mask: Bool[Tensor, "B 1 S"], *, n_beams: int
    ) -> RowState:
        """Before the first step the readout is zero."""
        state = super().start(first, memory, mask, n_beams=n_beams)
        state.rows["feed"] = wide(memory).new_zeros(state.n_rows, self.readout.out_features)
        return state

    def forward(self, x: Float[Tensor, "N T D"], state: RowState) -> Float[Tensor, "N T D"]:
        states, feed, outputs = self._states(state), state.rows["feed"], list[Tensor]()
        for now in _steps(x):
            states = self._step(torch.cat([now, feed], -1), states)
            hidden = states[-1][0]
            context = self._context(hidden[:, None], state)[:, 0]
            feed = wide_linear(torch.cat([context, hidden], -1), self.readout.weight, None).tanh()
            outputs.append(feed)
        self._keep(states, state, len(outputs))
        state.rows["feed"] = feed
        return self._scaled(torch.stack(outputs, 1).to(x.dtype))


class BahdanauDecoder(AttentiveDecoder):
    """Attention of the state before the step, which reads the context beside the token (Bahdanau et al. 2015, A.1.2).

    The readout is max of pairs of W [state before the step; embedding; context] (maxout, A.2.2).
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        d = sizes.d_hidden
        super().__init__(sizes, AdditiveAttention(d), d_more=d)
        self.readout = Linear(2 * d + sizes.d_model, 2 * sizes.d_model)

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
