"""Recurrent units: the LSTM and the GRU, over whole sequences and step by step.

All sequences here are time first, [T, N, ...], so that a step is a contiguous block. Everything that does not depend on
the previous state is computed for all steps at once. In the backward pass too: the gradient of a weight is one product
over all steps, where differentiation of a loop would add up one product per step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transduce.nn.linear import Linear, linear, product_dtype, wide

State = tuple[Tensor, ...]
"""The state of a unit, [N, H] each: the hidden state, and for the LSTM the cell state."""
Gradients = tuple[Tensor, Tensor, tuple[Tensor | None, ...]]


class GateLinear(Linear):
    """The matrices of several gates, of the same input and width, one below the other."""

    def __init__(self, d_in: int, d_out: int, *, n_gates: int, bias: bool) -> None:
        super().__init__(d_in, n_gates * d_out, bias=bias)
        self.rows = (d_out,) * n_gates


class Cell(nn.Module, ABC):
    """A recurrent unit. Its gates are W x + U h, with a further product V y if there is a second input y."""

    n_gates: ClassVar[int]
    n_states: ClassVar[int]
    recurrent_bias: ClassVar[bool]

    def __init__(self, d_in: int, d_hidden: int, *, d_more: int = 0) -> None:
        """`d_more`: width of the second input; 0: none."""
        super().__init__()
        self.d_hidden = d_hidden
        self.input = GateLinear(d_in, d_hidden, n_gates=self.n_gates, bias=True)
        self.more = GateLinear(d_more, d_hidden, n_gates=self.n_gates, bias=False) if d_more else None
        self.recurrent = GateLinear(d_hidden, d_hidden, n_gates=self.n_gates, bias=self.recurrent_bias)

    @torch.no_grad()
    def initialize(self) -> None:
        """Glorot-uniform matrices, orthogonal ones from state to state (Bahdanau et al. 2015, B.1), zero biases."""
        for layer in (self.input, self.more, self.recurrent):
            if layer is None:
                continue
            for part in layer.weight.split(self.d_hidden):
                (nn.init.orthogonal_ if layer is self.recurrent else nn.init.xavier_uniform_)(part)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, x: Float[Tensor, "T N I"], state: State) -> State:
        """The states after every step, [T, N, H] each, from a sequence of inputs and the state before it."""
        return _Scan.apply(type(self), self.input(x), self.recurrent.weight, self.recurrent.bias, *map(wide, state))

    @staticmethod
    @abstractmethod
    def step(x: Tensor, product: Tensor, state: State) -> tuple[State, State]:
        """The next state, and what `step_gradient` needs, from W x and U h [N, G * H]."""

    @staticmethod
    @abstractmethod
    def step_gradient(saved: State, grads: Sequence[Tensor]) -> Gradients:
        """Gradients of W x, of U h, and of the state as far as they do not go through U h; None for zero."""


class LSTM(Cell):
    """o, i, f = sigmoid; g = tanh of the gates; c' = f c + i g; h' = o tanh(c') (Hochreiter and Schmidhuber 1997)."""

    n_gates, n_states, recurrent_bias = 4, 2, False

    @torch.no_grad()
    def initialize(self) -> None:
        """Also a bias of 1 on the forget gate (Jozefowicz et al. 2015)."""
        super().initialize()
        self.input.bias[2 * self.d_hidden : 3 * self.d_hidden] = 1.0

    @staticmethod
    def step(x: Tensor, product: Tensor, state: State) -> tuple[State, State]:
        """See `Cell`."""
        gates, width = x + product, x.shape[1] // 4
        gates[:, : 3 * width].sigmoid_()
        gates[:, 3 * width :].tanh_()
        o, i, f, g = gates.split(width, 1)
        before = state[1]
        cell = (f * before).addcmul_(i, g)
        squashed = cell.tanh()
        return (o * squashed, cell), (gates, before, squashed)

    @staticmethod
    def step_gradient(saved: State, grads: Sequence[Tensor]) -> Gradients:
        """See `Cell`."""
        gates, before, squashed = saved
        hidden, width = grads[0], before.shape[1]
        o, i, f, g = gates.split(width, 1)
        cell = torch.ops.aten.tanh_backward(hidden * o, squashed).add_(grads[1])
        raw, split = torch.empty_like(gates), 3 * width
        products = (hidden, squashed), (cell, g), (cell, before), (cell, i)
        for part, (a, b) in zip(raw.split(width, 1), products, strict=True):
            torch.mul(a, b, out=part)
        sigmoids, tanh = raw[:, :split], raw[:, split:]
        torch.ops.aten.sigmoid_backward(sigmoids, gates[:, :split], grad_input=sigmoids)
        torch.ops.aten.tanh_backward(tanh, g, grad_input=tanh)
        return raw, raw, (None, cell.mul_(f))


class GRU(Cell):
    """r, z = sigmoid of the gates; n = tanh(W x + r (U h)); h' = (1 - z) n + z h (Cho et al. 2014).

    As in cuDNN and PyTorch, r multiplies the product U h; in the paper it multiplies h.
    """

    n_gates, n_states, recurrent_bias = 3, 1, True

    @staticmethod
    def step(x: Tensor, product: Tensor, state: State) -> tuple[State, State]:
        """See `Cell`."""
        (before,), width = state, x.shape[1] // 3
        gates = (x[:, : 2 * width] + product[:, : 2 * width]).sigmoid_()
        r, z = gates.split(width, 1)
        own = product[:, 2 * width :]
        new = (x[:, 2 * width :] + r * own).tanh_()
        return (new + z * (before - new),), (gates, new, own, before)

    @staticmethod
    def step_gradient(saved: State, grads: Sequence[Tensor]) -> Gradients:
        """See `Cell`."""
        gates, new, own, before = saved
        (hidden,), width = grads, new.shape[1]
        r, z = gates.split(width, 1)
        kept = hidden * z
        n = torch.ops.aten.tanh_backward(hidden - kept, new)
        rz = torch.ops.aten.sigmoid_backward(torch.cat([n * own, hidden * (before - new)], 1), gates)
        return torch.cat([rz, n], 1), torch.cat([rz, n * r], 1), (kept,)


CELLS: dict[str, type[Cell]] = {"lstm": LSTM, "gru": GRU}


class _Scan(torch.autograd.Function):
    """A unit over a whole sequence: inputs are the type of the unit, W x [T, N, G * H], U, its bias, and the state."""

    @staticmethod
    def forward(ctx: Any, cell: type[Cell], x: Tensor, weight: Tensor, bias: Tensor | None, *state: Tensor) -> State:
        dtype = product_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            x, u = wide(x), weight.to(dtype)
            b = None if bias is None else bias.to(dtype)
            current, steps, saved = state, [], []
            for now in x.unbind(0):
                current, kept = cell.step(now, linear(current[0].to(dtype), u, b), current)
                steps.append(current)
                saved.append(kept)
            outputs = tuple(torch.stack(parts) for parts in zip(*steps, strict=True))
        ctx.save_for_backward(u, state[0], outputs[0], *(tensor for kept in saved for tensor in kept))
        ctx.cell, ctx.dtypes, ctx.has_bias = cell, (x.dtype, weight.dtype), bias is not None
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        u, first, hidden, *saved = ctx.saved_tensors
        n_saved = len(saved) // len(hidden)
        with torch.autocast(u.device.type, enabled=False):
            columns = [None if grad is None else grad.unbind(0) for grad in grads]
            carried = tuple(torch.zeros_like(first) for _ in grads)
            inputs, products = [], []
            for t in range(len(hidden) - 1, -1, -1):
                given = [c if g is None else c + g[t] for c, g in zip(carried, columns, strict=True)]
                kept = tuple(saved[t * n_saved : (t + 1) * n_saved])
                d_x, d_product, (d_hidden, *rest) = ctx.cell.step_gradient(kept, given)
                inputs.append(d_x)
                products.append(d_product)
                through = (d_product.to(u.dtype) @ u).to(d_product.dtype)
                carried = (through if d_hidden is None else through.add_(d_hidden), *rest)
            d_x = torch.stack(inputs[::-1])
            d_products = d_x if products[0] is inputs[0] else torch.stack(products[::-1])
            before = torch.cat([first[None], hidden[:-1]]).to(u.dtype)
            flat = d_products.flatten(0, 1)
            d_weight = (flat.to(u.dtype).t() @ before.flatten(0, 1)).to(ctx.dtypes[1])
        return None, d_x.to(ctx.dtypes[0]), d_weight, flat.sum(0) if ctx.has_bias else None, *carried


class StepLinear:
    """A linear layer that a loop over time applies once per step; made anew for every sequence.

    The gradient of its weight is one product, when the gradients of all steps are known.
    """

    def __init__(self, layer: nn.Linear) -> None:
        dtype = product_dtype(layer.weight)
        self._weight, self._bias = layer.weight.to(dtype), None if layer.bias is None else layer.bias.to(dtype)
        self._inputs: list[Tensor] = []
        self._grads: list[Tensor] = []
        if torch.is_grad_enabled() and layer.weight.requires_grad:
            self._weight, self._bias = _Collect.apply(self._weight, self._bias, self._inputs, self._grads)

    def __call__(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        """x W^T + b, at least float32."""
        return _StepProduct.apply(x, self._weight, self._bias, self._inputs, self._grads)


class _Collect(torch.autograd.Function):
    """Passes a weight on; its gradient is made of what the steps have collected."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, inputs: list[Tensor], grads: list[Tensor]) -> Any:
        ctx.inputs, ctx.grads, ctx.has_bias = inputs, grads, bias is not None
        return weight.clone(), None if bias is None else bias.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Any, ...]:
        x, grad = (torch.cat([part.flatten(0, -2) for part in parts]) for parts in (ctx.inputs, ctx.grads))
        ctx.inputs.clear()
        ctx.grads.clear()
        return grad.t() @ x, grad.sum(0) if ctx.has_bias else None, None, None


class _StepProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, inputs: list[Tensor], grads: list[Tensor]
    ) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            given = x.to(weight.dtype)
            ctx.save_for_backward(given, weight)
            ctx.inputs, ctx.grads, ctx.dtype = inputs, grads, x.dtype
            return wide(linear(given, weight, bias))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        ctx.inputs.append(x)
        ctx.grads.append(grad)
        with torch.autocast(x.device.type, enabled=False):
            return (grad @ weight).to(ctx.dtype), None, None, None, None


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cell: type[Cell], x: Tensor, product: Tensor, *state: Tensor) -> State:
        new, saved = cell.step(x, product, state)
        ctx.save_for_backward(*saved)
        ctx.cell = cell
        return new

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        d_x, d_product, d_state = ctx.cell.step_gradient(ctx.saved_tensors, grads)
        return None, d_x, d_product, *d_state


class CellStepper:
    """A unit for a loop over time, made anew for every sequence."""

    def __init__(self, cell: Cell) -> None:
        self._cell = type(cell)
        self._recurrent = StepLinear(cell.recurrent)

    def __call__(self, x: Float[Tensor, "N G"], state: State) -> State:
        """The next state, from W x and the state before it."""
        return _Step.apply(self._cell, x, self._recurrent(state[0]), *state)
