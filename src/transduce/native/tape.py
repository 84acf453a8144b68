"""Gradients of a block of layers by a tape, with one node in PyTorch's graph for the whole block.

PyTorch's engine takes 50 microseconds for the two passes of an operator, as long as a small operator itself. Inside
`taped`, operators are written to a list instead, and the backward pass goes through it from the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from transduce.native import deferred
from transduce.native.kernels import dtype_in_use


class Operator(torch.autograd.Function):
    """A function with a gradient, for PyTorch's graph or for a tape."""

    differentiable: ClassVar[int]
    """How many of its first arguments can have a gradient."""
    gradients: ClassVar[Callable[..., Any]]
    """`backward` for callers that have switched gradients off."""

    def __init_subclass__(cls) -> None:
        cls.gradients = staticmethod(cls.backward)
        cls.backward = staticmethod(once_differentiable(cls.backward))  # type: ignore[method-assign, assignment]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        tape = deferred.tape()
        return super().apply(*args) if tape is None else tape.run(cls, args)


class NotTaped(Exception):
    """Something else than an operator has computed."""


class _Context:
    """What an operator keeps for its backward pass, as in PyTorch's `FunctionCtx`."""

    def __init__(self, needs_input_grad: Sequence[bool]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Operators are always given None for no gradient."""


class Tape:
    """Operators in the order in which they were called. Tensors are known by `id`."""

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        self._steps: list[tuple[Callable[..., Any], list[int], list[int]]] = []
        self._known = {id(x): x for x in inputs}  # during the forward pass, so that an id is one tensor's

    def run(self, operator: type[Operator], args: tuple[Any, ...]) -> Any:
        """Call an operator whose differentiable arguments are known, or parameters without a gradient for the tape."""
        given = args[: operator.differentiable]
        context = _Context([self._needs_gradient(x) for x in given])
        found = operator.forward(context, *args)
        outputs = found if isinstance(found, tuple) else (found,)
        self.add(partial(operator.gradients, context), given, outputs)
        return found

    def add(self, backward: Callable[..., Any], args: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        """Note a step whose `backward` takes gradients of outputs, and returns those of arguments and perhaps more."""
        self._known.update((id(x), x) for x in outputs if x is not None)
        self._steps.append((backward, [id(x) for x in args], [id(x) for x in outputs]))

    def _needs_gradient(self, x: Tensor | None) -> bool:
        if x is None or id(x) in self._known:
            return x is not None
        if type(x) is not nn.Parameter or (x.requires_grad and not deferred.is_taken(x)):
            raise NotTaped
        return x.requires_grad

    def knows(self, x: Tensor) -> bool:
        return id(x) in self._known

    def finish(self) -> None:
        """Keep nothing but what operators need."""
        self._known.clear()

    def backward(self, grads: dict[int, Tensor | None]) -> None:
        """Replace the gradients of the outputs by those of the inputs. The tape is empty afterwards."""
        while self._steps:
            step, args, outputs = self._steps.pop()
            of_outputs = [grads.pop(x, None) for x in outputs]
            if all(grad is None for grad in of_outputs):
                continue
            for x, grad in zip(args, step(*of_outputs), strict=False):
                known = grads.get(x)
                if known is not None and grad is not None:
                    deferred.flush()
                    grad = known + grad
                grads[x] = known if grad is None else grad


class _Taped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, compute, *inputs):  # type: ignore[no-untyped-def]
        """Return the output, and its rounded copy or None."""
        tape = Tape(inputs)
        with deferred.onto(tape), torch.enable_grad():  # as outside, so that modules do the same
            output = compute()
        if not tape.knows(output):
            raise NotTaped
        outputs = output, rounded_copy(output)
        ctx.set_materialize_grads(False)
        ctx.tape, ctx.inputs, ctx.outputs = tape, [id(x) for x in inputs], [id(x) for x in outputs]
        ctx.takes_gradients = deferred.takes_gradients()
        tape.finish()
        return tuple(None if x is None else deferred.written(x) for x in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *given):  # type: ignore[no-untyped-def]
        assert deferred.takes_gradients() == ctx.takes_gradients, "gradients of parameters would be lost"
        grads = dict(zip(ctx.outputs, given, strict=True))
        with nullcontext() if ctx.takes_gradients else deferred.deferred(), deferred.onto(ctx.tape):
            ctx.tape.backward(grads)
        found = (grads.get(x) for x in ctx.inputs)
        return None, *(None if x is None else deferred.written(x) for x in found)


def taped(compute: Callable[[], Tensor], inputs: Sequence[Tensor], parameters: Iterable[nn.Parameter]) -> Tensor:
    """What `compute` returns; it has no effect, and uses these inputs and parameters only.

    Raises:
        NotTaped: It uses more than operators and views. Nothing has been kept.
    """
    copies = [copy for x in inputs if (copy := rounded_copy(x)) is not None]
    # If gradients are taken, parameters only say that the output has a gradient.
    is_enough = deferred.takes_gradients() and any(x.requires_grad for x in inputs)
    others = () if is_enough else (p for p in parameters if p.requires_grad)
    return with_rounded(*_Taped.apply(compute, *inputs, *copies, *others))


def rearranged(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """A view of x, made by `there`; `back` makes x's gradient of the view's."""
    found = there(x)
    if (tape := deferred.tape()) is not None and tape.knows(x):
        tape.add(lambda grad: (back(grad),), (x,), (found,))
    return found


def with_rounded(x: Tensor, copy: Tensor | None) -> Tensor:
    """x, which keeps a rounded copy for linear layers.

    The gradients of both are added where the norm's is computed, and not by PyTorch's engine in a pass of its own.
    """
    if copy is not None:
        vars(x)["_rounded"] = copy, x._version
    return x


def rounded_copy(x: Tensor) -> Tensor | None:
    """The copy of x in the type of the products in use, if it has one and has not been changed since."""
    copy, version = vars(x).get("_rounded", (None, 0))
    return copy if copy is not None and copy.dtype == dtype_in_use() and version == x._version else None


def rounded(x: Tensor) -> Tensor:
    """The rounded copy of x, if it has one; otherwise x."""
    copy = rounded_copy(x)
    return x if copy is None else copy
