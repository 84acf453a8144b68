"""Recurrent decoders: without attention, with attention before a step (Bahdanau) and after it (Luong)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from transduce.nn.dropout import Dropout
from transduce.nn.linear import Linear, wide
from transduce.nn.masks import attention_bias
from transduce.nn.recurrent import CELLS, CellStepper, State, StepLinear
from transduce.nn.state import RowState
from transduce.nn.state_attention import AdditiveAttention, StateAttention


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
        """`d_more`: width of the first layer's second input."""
        super().__init__()
        d, cell = sizes.d_hidden, CELLS[sizes.cell]
        layers = [cell(d if n else sizes.d_model, d, d_more=0 if n else d_more) for n in range(sizes.n_layers)]
        self.layers: Any = nn.ModuleList(layers)
        self.dropout = Dropout(sizes.dropout)
        self.readout_scale = sizes.readout_scale

    def start(
        self, first: Sequence[State], memory: Float[Tensor, "B S H"], mask: Bool[Tensor, "B 1 S"], *, n_beams: int
    ) -> RowState:
        """The state before the first token, from the first state [B, H] of every layer."""
        state = RowState({})
        self._keep(first, state, 0)
        if n_beams > 1:
            state.fan_out(n_beams)
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

    def _scan(self, x: Float[Tensor, "N T D"], state: RowState) -> Float[Tensor, "N T H"]:
        """The hidden states of the last layer, where no step depends on attention."""
        last, x = [], x.transpose(0, 1).contiguous()
        for n, (cell, first) in enumerate(zip(self.layers, self._states(state), strict=True)):
            found = cell(self.dropout(x) if n else x, first)
            last.append(tuple(part[-1] for part in found))
            x = found[0].to(x.dtype)
        self._keep(last, state, len(x))
        return x.transpose(0, 1)


class PlainDecoder(RecurrentDecoder):
    """No attention: all that the decoder knows of the source is its first state (Sutskever et al. 2014).

    The readout is tanh(W s), of the width of the embeddings.
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__(sizes)
        self.readout = Linear(sizes.d_hidden, sizes.d_model, bias=False)

    def forward(self, x: Float[Tensor, "N T D"], state: RowState) -> Float[Tensor, "N T D"]:
        """See `RecurrentDecoder`."""
        return self._scaled(self.readout(self._scan(x, state)).tanh())


class AttentiveDecoder(RecurrentDecoder):
    """A decoder with attention to the memory."""

    def __init__(self, sizes: DecoderSizes, attention: StateAttention, *, d_more: int = 0) -> None:
        super().__init__(sizes, d_more=d_more)
        self.attention = attention

    def start(
        self, first: Sequence[State], memory: Float[Tensor, "B S H"], mask: Bool[Tensor, "B 1 S"], *, n_beams: int
    ) -> RowState:
        """See `RecurrentDecoder`; the memory and its keys are computed once per sentence."""
        state = super().start(first, memory, mask, n_beams=n_beams)
        keys, bias = self.attention.keys(memory), attention_bias(mask)[:, 0]  # [B, 1, S]
        state.sentences = {"memory": wide(memory), "keys": wide(keys), "bias": bias}
        return state

    def _context(self, query: Float[Tensor, "N T H"], state: RowState) -> Float[Tensor, "N T H"]:
        """The contexts of projected queries; the beams of a sentence share its memory."""
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
        """See `RecurrentDecoder`."""
        hidden = wide(self._scan(x, state))
        project = self.attention.project()
        context = self._context(hidden if project is None else project(hidden), state)
        return self._scaled(self.readout(torch.cat([context, hidden], -1).to(x.dtype)).tanh())


class _Loop:
    """What one pass over a sequence needs of a decoder's layers, step by step."""

    def __init__(self, decoder: AttentiveDecoder, x: Float[Tensor, "N T D"]) -> None:
        layers = decoder.layers
        self.first = wide(layers[0].input(x.transpose(0, 1).contiguous())).unbind(0)
        self.project = decoder.attention.project()
        self._more = StepLinear(layers[0].more)
        self._inputs = [StepLinear(cell.input) for cell in layers[1:]]
        self._units = [CellStepper(cell) for cell in layers]
        self._dropout = decoder.dropout

    def step(self, x: Float[Tensor, "N G"], more: Float[Tensor, "N M"], states: Sequence[State]) -> list[State]:
        """The next states of all layers."""
        gates, new = x + self._more(more), list[State]()
        for n, (unit, state) in enumerate(zip(self._units, states, strict=True)):
            gates = self._inputs[n - 1](self._dropout(new[-1][0])) if n else gates
            new.append(unit(gates, state))
        return new


class InputFeedingDecoder(LuongDecoder):
    """Luong's decoder with the readout of each step as a second input of the next (3.3)."""

    def __init__(self, sizes: DecoderSizes, attention: StateAttention) -> None:
        super().__init__(sizes, attention, d_more=sizes.d_model)

    def start(
        self, first: Sequence[State], memory: Float[Tensor, "B S H"], mask: Bool[Tensor, "B 1 S"], *, n_beams: int
    ) -> RowState:
        """See `AttentiveDecoder`; before the first step the readout is zero."""
        state = super().start(first, memory, mask, n_beams=n_beams)
        state.rows["feed"] = wide(memory).new_zeros(state.n_rows, self.readout.out_features)
        return state

    def forward(self, x: Float[Tensor, "N T D"], state: RowState) -> Float[Tensor, "N T D"]:
        """See `RecurrentDecoder`."""
        loop, readout, outputs = _Loop(self, x), StepLinear(self.readout), []
        states, feed = self._states(state), state.rows["feed"]
        for now in loop.first:
            states = loop.step(now, feed, states)
            hidden = states[-1][0]
            query = hidden if loop.project is None else loop.project(hidden)
            context = self._context(query[:, None], state)[:, 0]
            feed = readout(torch.cat([context, hidden], -1)).tanh()
            outputs.append(feed)
        self._keep(states, state, len(outputs))
        state.rows["feed"] = feed
        return self._scaled(torch.stack(outputs, 1).to(x.dtype))


class BahdanauDecoder(AttentiveDecoder):
    """Attention of the state before the step; the context is a second input of the step (Bahdanau et al. 2015, A.1.2).

    The readout is max of pairs of W [state before the step; embedding; context] (maxout, A.2.2).
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        d = sizes.d_hidden
        super().__init__(sizes, AdditiveAttention(d), d_more=d)
        self.readout = Linear(2 * d + sizes.d_model, 2 * sizes.d_model)

    def forward(self, x: Float[Tensor, "N T D"], state: RowState) -> Float[Tensor, "N T D"]:
        """See `RecurrentDecoder`."""
        loop, read = _Loop(self, x), []
        assert loop.project is not None
        states = self._states(state)
        for now in loop.first:
            before = states[-1][0]
            context = self._context(loop.project(before)[:, None], state)[:, 0]
            read.append(torch.cat([before, context], -1))
            states = loop.step(now, context, states)
        self._keep(states, state, len(read))
        pairs = self.readout(torch.cat([torch.stack(read, 1).to(x.dtype), x], -1))
        return self.dropout(torch.maximum(*pairs.chunk(2, -1)))
