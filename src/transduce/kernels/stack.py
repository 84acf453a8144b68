"""Stacks of Transformer blocks, each computed by one call of the C++ library forward and one backward.

`StackEncoder` and `StackDecoder` compute the same functions as their base classes. The base classes still compute a
stack that the library does not support, or whose inner values are read by hooks or a recorder.
"""

from __future__ import annotations

import ctypes
import mmap
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import _has_any_global_hook

from transduce.kernels.calls import (
    broadcast_strides,
    gradient_place,
    n_threads,
    new_seed,
    pointers,
    products_dtype,
    writes_gradients,
)
from transduce.kernels.library import address, loaded_library
from transduce.kernels.products import FOR_CPUS
from transduce.nn.attention import CrossAttention, FullProjection, MultiHeadAttention, SelfAttention
from transduce.nn.feedforward import FeedForward, GatedFeedForward
from transduce.nn.masks import attention_bias
from transduce.nn.patterns import CausalPattern, FullPattern
from transduce.nn.positions import Positions, RotaryPositions
from transduce.nn.recurrent import SSRU
from transduce.nn.stack import Decoder, DecoderBlock, Encoder, EncoderBlock, PostNorm, PreNorm, Stack
from transduce.nn.state import DecoderState

T = TypeVar("T")

_ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")  # numbered as in transduce_stack_call
_MAX_POSITIONS = 1 << 16


class _StackCall(ctypes.Structure):
    """The struct `transduce_stack_call` of native/src/transduce_native.h."""

    _fields_ = [
        ("batch", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("positions", "width", "n_blocks", "inner_width", "heads", "kv_heads")),
        *((name, ctypes.c_int32) for name in ("key_width", "value_width", "memory_positions", "is_bf16", "pre_norm")),
        *((name, ctypes.c_int32) for name in ("rms", "causal", "activation", "gated", "recurrent")),
        *((name, ctypes.c_float) for name in ("epsilon", "p", "attention_p", "activation_p")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("weights", "grads", "adds", "x", "bias")),
        ("bias_strides", ctypes.c_int64 * 3),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "memory", "memory_bias")),
        ("memory_bias_strides", ctypes.c_int64 * 3),
        *((name, ctypes.c_void_p) for name in ("kept", "output", "grad_output", "grad_x", "grad_memory")),
    ]


class _UnsupportedError(Exception):
    """Raised for a stack that the library cannot compute."""


def _common(values: Iterable[T]) -> T:
    """Return the value that all `values` equal; raise `_UnsupportedError` if they differ."""
    value, *others = set(values)
    if others:
        raise _UnsupportedError(f"parts of the stack differ: {value}, {others}")
    return value


class Plan:
    """The arguments that all library calls for one stack share, and the stack's parameters in the library's order."""

    def __init__(self, stack: Stack) -> None:
        """Raise `_UnsupportedError` if the library does not support this stack; see `plan_of`."""
        if not _is_known(stack):
            raise _UnsupportedError("a part of the stack may compute something that the library does not know")
        blocks: list[Any] = list(stack.blocks)
        own = [block.self_attention for block in blocks]
        cross = [block.cross_attention for block in blocks if _has_memory(block)]
        networks = [block.feed_forward for block in blocks]
        residuals = [part for block in blocks for part in block.children() if isinstance(part, PostNorm)]
        layers = [layer for block in blocks for layer in _layers(block)]
        pre_norm = _common(map(type, residuals)) is PreNorm
        if pre_norm:
            layers.append(stack.norm)
        norms = [layer for layer in layers if isinstance(layer, (nn.LayerNorm, nn.RMSNorm))]
        self.is_recurrent = _common(map(type, own)) is SSRU
        self._attentions: list[MultiHeadAttention] = [*([] if self.is_recurrent else own), *cross]
        sizes = [(a.n_heads, a.n_kv_heads, a.d_key, a.d_head) for a in self._attentions]
        heads, kv_heads, d_key, d_head = _common(sizes or [(1, 1, 1, 1)])
        if sizes and heads * d_head != norms[0].weight.numel():
            raise _UnsupportedError("heads have values of another width than d_model / n_heads")
        self.fields = {
            "width": norms[0].weight.numel(),
            "n_blocks": len(blocks),
            "inner_width": _common(network.d_ff for network in networks),
            "heads": heads,
            "kv_heads": kv_heads,
            "key_width": d_key,
            "value_width": d_head,
            "pre_norm": pre_norm,
            "rms": _common(map(type, norms)) is nn.RMSNorm,
            "activation": _ACTIVATIONS.index(_common(network.activation for network in networks)),
            "gated": _common(map(type, networks)) is GatedFeedForward,
            "recurrent": self.is_recurrent,
            "epsilon": _common(norm.eps for norm in norms),
        }
        dropouts = [r.dropout for r in residuals], [a.dropout for a in self._attentions], [n.dropout for n in networks]
        self._dropouts = dropouts
        self._slots = [(layer._parameters, name) for layer in layers for name in ("weight", "bias")]
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        self._hooks = [getattr(module, name) for module in stack.modules() if module is not stack for name in hooks]
        self._memory: Tensor | None = None
        self._gradients: list[Tensor | None] = []

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle and copy a plan as None, so that a copied module makes a new plan."""
        return type(None), ()

    def dropout_rates(self) -> tuple[float, float, float] | None:
        """Return the current dropout rates of residual connections, attention weights and activations.

        Return None if the rates differ among layers.
        """
        rates = [{d.p if d.training else 0.0 for d in dropouts} or {0.0} for dropouts in self._dropouts]
        if any(len(different) > 1 for different in rates):
            return None
        residual, attention, activation = (different.pop() for different in rates)
        return residual, attention, activation

    def parameters(self) -> list[Tensor | None]:
        return [parameters.get(name) for parameters, name in self._slots]

    def is_watched(self) -> bool:
        """Whether hooks or a recorder read values inside the stack, which the library does not return."""
        is_recorded = any("attend" in vars(module) for module in self._attentions)
        return is_recorded or any(self._hooks) or _has_any_global_hook()

    def memory(self, n_bytes: int, *, reuse: bool) -> Tensor:
        """Return memory for saved activations; with `reuse`, the memory of an earlier update if it is large enough."""
        if not reuse:
            return torch.empty(n_bytes, dtype=torch.uint8)
        known, self._memory = self._memory, None
        if known is not None and len(known) >= n_bytes:
            return known
        del known  # frees the old memory before the new memory is allocated
        try:
            pages = mmap.mmap(-1, n_bytes + n_bytes // 8)  # malloc would keep holes of earlier sizes
        except OSError as error:
            raise MemoryError(f"{n_bytes:,} bytes for a stack") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.uint8)

    def give_back(self, memory: Tensor) -> None:
        """Keep the memory of a forward pass for reuse; called after its only backward pass."""
        self._memory = memory

    def gradients(self, parameters: list[Tensor | None], *, writes: bool) -> tuple[list[Tensor | None], array[int]]:
        """Return a tensor for each parameter's gradient, and an int8 each: 1 if the library adds to its values.

        `writes`: whether to use the parameters' `grad` directly (`gradient_place`), in the same memory in every update.
        """
        gradients, adds = list(self._gradients) if writes else [], array("b", [0]) * len(parameters)
        if not gradients:
            sizes = [0 if p is None else p.numel() for p in parameters]
            parts = zip(parameters, torch.empty(sum(sizes), dtype=torch.float32).split(sizes), strict=True)
            gradients = [None if p is None else part.view(p.shape) for p, part in parts]
        if not writes:
            return gradients, adds
        self._gradients = list(gradients)
        for i, (parameter, memory) in enumerate(zip(parameters, self._gradients, strict=True)):
            if parameter is not None and memory is not None:
                gradients[i], adds[i] = gradient_place(parameter, memory)
        return gradients, adds


_KNOWN = {
    *(SelfAttention, SSRU, CrossAttention, FeedForward, GatedFeedForward, PostNorm, PreNorm),
    *(nn.Linear, FullProjection, nn.LayerNorm, nn.RMSNorm),
}
_KNOWN |= {FOR_CPUS[kind] for kind in _KNOWN & FOR_CPUS.keys()}
"""Classes whose `forward` the library can compute. Their subclasses, such as layers with adapters, are not included."""


def _is_known(stack: Stack) -> bool:
    """Whether the library can compute every part of a stack, judged by the parts' classes."""
    pattern = {Encoder: FullPattern, StackEncoder: FullPattern, Decoder: CausalPattern, StackDecoder: CausalPattern}
    if not isinstance(stack, (Encoder, Decoder)) or [*map(type, stack.patterns)] != [pattern.get(type(stack))]:
        return False
    parts = [part for block in stack.blocks for part in block.children()]
    if not {*map(type, stack.blocks)} <= {EncoderBlock, DecoderBlock} or not {*map(type, parts)} <= _KNOWN:
        return False
    layers = [layer for block in stack.blocks for layer in _layers(block)]
    norms = [layer for layer in (*layers, stack.norm) if isinstance(layer, (nn.LayerNorm, nn.RMSNorm))]
    return (
        {*map(type, layers)} <= _KNOWN
        and {block.feed_forward.activation for block in stack.blocks} <= {*_ACTIVATIONS}
        and len({_has_memory(block) for block in stack.blocks}) == 1
        and all(norm.weight is not None and norm.eps is not None for norm in norms)
        and not any("forward" in vars(module) for module in stack.modules())
    )


def _has_memory(block: Any) -> bool:
    return isinstance(block, DecoderBlock) and block.cross_attention is not None


def _layers(block: Any) -> Iterator[nn.Module]:
    """Yield the linear layers and norms of a block in the order of the library's `transduce_stack_call`."""
    own = block.self_attention
    yield from (own.gate_value,) if isinstance(own, SSRU) else (own.query_key_value, own.output)
    yield block.self_attention_residual.norm
    if _has_memory(block):
        cross = block.cross_attention
        yield from (cross.query, cross.key_value, cross.output, block.cross_attention_residual.norm)
    yield from (block.feed_forward.expand, block.feed_forward.contract, block.feed_forward_residual.norm)


def plan_of(stack: Stack) -> Plan | None:
    """Return the plan of a stack, which is made once, or None if the library cannot compute the stack."""
    plan: Plan | Literal[False] | None = vars(stack).get("_plan")
    if plan is None:
        try:
            plan = Plan(stack)
        except _UnsupportedError:
            plan = False
        vars(stack)["_plan"] = plan
    return plan or None


def _plan_for(stack: Stack, x: Tensor, scheme: Positions) -> Plan | None:
    """Return the plan of a stack if the library can compute it for the input x now, otherwise None."""
    plan = plan_of(stack) if x.is_cpu and products_dtype() is not None else None
    if plan is None or not (plan.is_recurrent or knows(scheme)) or not (0 < x.shape[1] <= _MAX_POSITIONS and len(x)):
        return None
    reads = all(p is None or (p.dtype == torch.float32 and p.is_cpu and p.is_contiguous()) for p in plan.parameters())
    return plan if reads and not plan.is_watched() and plan.dropout_rates() is not None else None


def knows(scheme: Positions) -> bool:
    """Whether the native library can train self-attention with a positional scheme.

    It supports schemes that add a bias without parameters to the scores, or that rotate queries and keys.
    """
    kind = type(scheme)
    rotates = kind.rotation in (Positions.rotation, RotaryPositions.rotation)
    is_fixed = kind.score_bias is Positions.score_bias or not any(True for _ in scheme.parameters())
    return rotates and is_fixed and kind.relations is Positions.relations


class StackEncoder(Encoder):
    """An encoder's stack, computed by one call of the C++ library."""

    def forward(
        self, x: Float[Tensor, "B S D"], *, mask: Bool[Tensor, "B 1 S"], positions: Positions
    ) -> Float[Tensor, "B S D"]:
        plan = _plan_for(self, x, positions)
        if plan is None:
            return super().forward(x, mask=mask, positions=positions)
        return _run(plan, x, positions, bias=attention_bias(mask))


@dataclass(slots=True, kw_only=True)
class WholeTarget(DecoderState):
    """The state of a `StackDecoder` that reads the whole target in one step. It has no caches, only the memory."""

    memory: Float[Tensor, "B S D"]
    mask: Bool[Tensor, "B 1 S"]


class StackDecoder(Decoder):
    """A decoder's stack, computed by one call of the C++ library if it reads whole targets, as in training."""

    def start(
        self, memory: Float[Tensor, "B S D"], mask: Bool[Tensor, "B 1 S"], *, capacity: int, n_beams: int
    ) -> DecoderState:
        if capacity or products_dtype() is None:
            return super().start(memory, mask, capacity=capacity, n_beams=n_beams)
        return WholeTarget(layers=[], memory_bias=attention_bias(mask), n_beams=n_beams, memory=memory, mask=mask)

    def forward(
        self,
        x: Float[Tensor, "N T D"],
        state: DecoderState,
        *,
        positions: Positions,
        documents: Int[Tensor, "N T"] | None = None,
    ) -> Float[Tensor, "N T D"]:
        if not isinstance(state, WholeTarget):
            return super().forward(x, state, positions=positions, documents=documents)
        plan = _plan_for(self, x, positions)
        if plan is None:
            state = super().start(state.memory, state.mask, capacity=0, n_beams=state.n_beams)
            return super().forward(x, state, positions=positions, documents=documents)
        bias = None
        if documents is not None:
            bias = attention_bias(documents[:, :, None] == documents[:, None, :])
        memory = (state.memory, state.memory_bias) if state.memory.shape[1] else (None, None)
        return _run(plan, x, positions, bias=bias, causal=True, memory=memory)


_anchor = torch.zeros(0, requires_grad=True)  # an input that makes the output require a gradient


def _run(
    plan: Plan,
    x: Float[Tensor, "B T D"],
    scheme: Positions,
    *,
    bias: Float[Tensor, "#B #H #T T"] | None,
    causal: bool = False,
    memory: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Float[Tensor, "B T D"]:
    """Compute a stack with the native library (C++); return its hidden states.

    `bias` hides keys in self-attention. `memory`: the encoder's output, and the bias that hides its padding.
    """
    rates = plan.dropout_rates()
    assert rates is not None
    angles: tuple[Tensor | None, Tensor | None] = (None, None)
    indices = torch.arange(x.shape[1])
    if isinstance(scheme, RotaryPositions) and not plan.is_recurrent:
        angles = scheme.angles(indices)
    if (scores := scheme.score_bias(indices, indices)) is not None:
        bias = scores[None] if bias is None else bias + scores
    residual, attention, activation = rates
    call = _StackCall(
        **plan.fields,
        batch=len(x),
        positions=x.shape[1],
        memory_positions=0 if memory[0] is None else memory[0].shape[1],
        is_bf16=products_dtype() == torch.bfloat16,
        causal=causal,
        p=residual,
        attention_p=attention,
        activation_p=activation,
        seed=new_seed() if any(rates) else 0,
    )
    parameters = plan.parameters()
    writes = writes_gradients() and torch.is_grad_enabled()
    inputs = [_anchor] if writes else [p for p in parameters if p is not None]
    return _Stack.apply(plan, call, parameters, angles, writes, bias, memory[1], x, memory[0], *inputs)


def _set(call: _StackCall, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        setattr(call, name, None if tensor is None else tensor.data_ptr())
        if name.endswith("bias") and tensor is not None:
            setattr(call, f"{name}_strides", broadcast_strides(tensor)[:3])


class _Stack(torch.autograd.Function):
    """Autograd function of the library's `transduce_stack` and its backward pass."""

    @staticmethod
    def forward(ctx, plan, call, parameters, angles, writes, bias, memory_bias, x, memory, *inputs):  # type: ignore[no-untyped-def]
        given = (None if tensor is None else tensor.float().contiguous() for tensor in (x, memory, bias, memory_bias))
        x, memory, bias, memory_bias = given
        weights = pointers(*parameters)
        call.weights = address(weights)
        _set(call, x=x, memory=memory, bias=bias, memory_bias=memory_bias, cos=angles[0], sin=angles[1])
        library, n_bytes = loaded_library(), ctypes.c_int64()
        library.transduce_stack_memory(ctypes.byref(call), ctypes.byref(n_bytes))
        kept = plan.memory(n_bytes.value, reuse=writes)
        output = torch.empty(x.shape, dtype=torch.float32)
        _set(call, kept=kept, output=output)
        library.transduce_stack(ctypes.byref(call), n_threads())
        ctx.plan, ctx.call, ctx.writes, ctx.parameters, ctx.weights = plan, call, writes, parameters, weights
        # The weights are saved too, so that PyTorch raises an error if they change before the backward pass.
        ctx.save_for_backward(kept, bias, memory_bias, x, memory, *angles, *inputs)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        kept, bias, memory_bias, x, memory, cos, sin, *_ = ctx.saved_tensors
        call, grad = _StackCall.from_buffer_copy(ctx.call), grad.contiguous()
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[7] else None
        grad_memory = torch.empty_like(memory) if ctx.needs_input_grad[8] else None
        gradients, adds = ctx.plan.gradients(ctx.parameters, writes=ctx.writes)
        addresses = pointers(*gradients)
        call.grads, call.adds = address(addresses), address(adds)
        # Hooks of saved tensors may have moved the tensors.
        _set(call, kept=kept, x=x, memory=memory, bias=bias, memory_bias=memory_bias, cos=cos, sin=sin)
        _set(call, grad_output=grad, grad_x=grad_x, grad_memory=grad_memory)
        loaded_library().transduce_stack_backward(ctypes.byref(call), n_threads())
        if ctx.writes:
            ctx.plan.give_back(kept)
        of_inputs = [None] if ctx.writes else [g for g in gradients if g is not None]
        return *[None] * 7, grad_x, grad_memory, *of_inputs
