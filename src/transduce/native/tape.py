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

    def __init__(self, tape: Tape, needs_input_grad: Sequence[bool]) -> None:
        self.needs_input_grad = needs_input_grad
        self._tape, self._saved = tape, slice(0)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        saved = self._tape.saved
        self._saved = slice(len(saved), len(saved) + len(tensors))
        saved.extend(tensors)

    @property
    def saved_tensors(self) -> Sequence[Tensor | None]:
        """To be read once in a backward pass: then the tape forgets them, so that their memory is free soon."""
        saved = self._tape.saved
        found = saved[self._saved]
        saved[self._saved] = [None] * len(found)
        return found

    def set_materialize_grads(self, value: bool) -> None:
        """Operators are always given None for no gradient."""


class Tape:
    """Operators in the order in which they were called. Tensors are known by `id`."""

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        self.saved: list[Tensor | None] = []
        self._steps: list[tuple[Callable[..., Any], list[int], list[int]]] = []
        self._known = {id(x): x for x in inputs}  # during the forward pass, so that an id is one tensor's

    def run(self, operator: type[Operator], args: tuple[Any, ...]) -> Any:
        """Call an operator whose differentiable arguments are known, or frozen parameters."""
        given = args[: operator.differentiable]
        context = _Context(self, [self._needs_gradient(x) for x in given])
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
        if type(x) is not nn.Parameter or x.requires_grad:
            raise NotTaped
        return False

    def knows(self, x: Tensor) -> bool:
        return id(x) in self._known

    def finish(self) -> list[Tensor | None]:
        """Forget all tensors; return those that the backward pass needs."""
        saved, self.saved = self.saved, []
        self._known.clear()
        return saved

    def backward(self, grads: dict[int, Tensor | None], saved: list[Tensor | None]) -> None:
        """Replace the gradients of the outputs by those of the inputs."""
        self.saved = saved
        for step, args, outputs in reversed(self._steps):
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
    def forward(ctx, compute, n_inputs, *inputs):  # type: ignore[no-untyped-def]
        """Return the output, and its rounded copy or None. The first inputs are not parameters."""
        tape = Tape(inputs)
        with deferred.onto(tape), torch.enable_grad():  # as outside, so that modules do the same
            output = compute()
        if not tape.knows(output):
            raise NotTaped
        outputs = output, rounded_copy(output)
        ctx.set_materialize_grads(False)
        ctx.tape, ctx.inputs, ctx.outputs = tape, [id(x) for x in inputs], [id(x) for x in outputs]
        ctx.n_inputs = n_inputs
        ctx.save_for_backward(*tape.finish())
        return tuple(None if x is None else deferred.written(x) for x in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *given):  # type: ignore[no-untyped-def]
        grads = dict(zip(ctx.outputs, given, strict=True))
        with nullcontext() if deferred.is_open() else deferred.deferred():
            with deferred.onto(ctx.tape):
                saved = list(ctx.saved_tensors)
                ctx.maybe_clear_saved_tensors()  # unless there will be another backward pass
                ctx.tape.backward(grads, saved)
            found = [grads.get(x) for x in ctx.inputs]
            if any(grad is not None for grad in found[ctx.n_inputs :]):
                deferred.flush()  # what becomes a parameter's `grad` is a plain tensor
            return None, None, *(None if x is None else deferred.written(x) for x in found)


def taped(compute: Callable[[], Tensor], inputs: Sequence[Tensor], parameters: Iterable[nn.Parameter]) -> Tensor:
    """What `compute` returns, which uses these inputs and parameters only.

    Raises:
        NotTaped: It uses more than operators and views. Random numbers have been drawn.
    """
    given = [*inputs, *(copy for x in inputs if (copy := rounded_copy(x)) is not None)]
    return with_rounded(*_Taped.apply(compute, len(given), *given, *(p for p in parameters if p.requires_grad)))


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
