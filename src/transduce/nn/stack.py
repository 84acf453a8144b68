"""Residual connections, blocks of sub-layers, and the stacks of an encoder and a decoder (paper 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from transduce.native import kernels, operators
from transduce.native.deferred import is_open
from transduce.native.tape import NotTaped, taped
from transduce.nn.attention import CrossAttention, FullProjection, SelfAttention
from transduce.nn.bias import Bias, padded_bias
from transduce.nn.cache import DecoderState, LayerCache
from transduce.nn.dropout import Dropout
from transduce.nn.feedforward import FeedForward
from transduce.nn.linear import Linear
from transduce.nn.masks import attention_bias
from transduce.nn.patterns import CausalPattern, FullPattern
from transduce.nn.positions import Positions, Rotate
from transduce.nn.ssru import SSRU


class LayerNorm(nn.LayerNorm):
    """LayerNorm that our kernels compute in training on a CPU, and on a GPU."""

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        return operators.normed(x, self) if kernels.norms(x) else super().forward(x)


class RMSNorm(nn.RMSNorm):
    """RMSNorm that our kernels compute in training on a CPU, and on a GPU."""

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        return operators.normed(x, self) if kernels.norms(x) else super().forward(x)


NORMS: dict[str, Callable[..., nn.Module]] = {
    "layer": lambda d_model, *, eps, bias: LayerNorm(d_model, eps=eps, bias=bias),
    "rms": lambda d_model, *, eps, bias: RMSNorm(d_model, eps=eps),
}


_KNOWN = (LayerNorm, RMSNorm, nn.LayerNorm, nn.RMSNorm)  # a subclass may compute something else


class PostNorm(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))): the paper's (3.1, 5.4)."""

    final_norm = False

    def __init__(self, norm: nn.Module, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x after the sub-layer, of the same shape."""
        return self._add(x, sublayer(x), self.norm)

    def _add(self, x: Tensor, update: Tensor, norm: nn.Module | None) -> Tensor:
        """x + Dropout(update), and the norm of that, if there is one."""
        if (norm is None or type(norm) in _KNOWN) and kernels.residual_in_use(x, update, norm):
            return operators.add_and_norm(x, update, norm, self.dropout.rate)
        total = self.dropout.add(x, update)
        return total if norm is None else norm(total)


class PreNorm(PostNorm):
    """x + Dropout(Sublayer(LayerNorm(x))) (Xiong et al. 2020): trains without warm-up, needs a final norm."""

    final_norm = True

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        x, normed = self._normed(x)
        return self._add(x, sublayer(normed), None)

    def _normed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x, and its norm."""
        if type(self.norm) in _KNOWN and kernels.computes(self.norm, x):
            return operators.normed_beside(x, self.norm)
        return x, self.norm(x)


RESIDUALS: dict[str, type[PostNorm]] = {"post": PostNorm, "pre": PreNorm}


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward, each with its residual connection (paper 3.1)."""

    untaped: torch.dtype | None = None
    """The type of the products with which the block has had no tape."""

    def __init__(
        self, *, attention: SelfAttention, feed_forward: FeedForward, residual: Callable[[], PostNorm]
    ) -> None:
        super().__init__()
        self.self_attention, self.feed_forward = attention, feed_forward
        self.self_attention_residual, self.feed_forward_residual = residual(), residual()

    def forward(self, x: Float[Tensor, "B S D"], *, bias: Bias, keep: Tensor, rotate: Rotate) -> Float[Tensor, "B S D"]:
        """x [B, S, D] after the block; `bias` hides padding, `keep` [B, S, 1] is False there."""

        def compute() -> Tensor:
            y = self.self_attention_residual(x, lambda y: self.self_attention(y, bias=bias, rotate=rotate))
            return self.feed_forward_residual(y, lambda y: self.feed_forward(y, keep))

        return _computed(self, compute, x)


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to the memory if there is one, feed-forward (paper 3.1).

    A recurrent unit may take the place of self-attention, and its name.
    """

    untaped: torch.dtype | None = None
    """The type of the products with which the block has had no tape."""

    def __init__(
        self,
        *,
        attention: SelfAttention | SSRU,
        cross: CrossAttention | None,
        feed_forward: FeedForward,
        residual: Callable[[], PostNorm],
    ) -> None:
        super().__init__()
        self.self_attention, self.cross_attention, self.feed_forward = attention, cross, feed_forward
        self.self_attention_residual, self.feed_forward_residual = residual(), residual()
        self.cross_attention_residual = residual() if cross is not None else None

    def forward(
        self, x: Float[Tensor, "B Q D"], *, bias: Bias, rotate: Rotate, cache: LayerCache, state: DecoderState
    ) -> Float[Tensor, "B Q D"]:
        """x [B, Q, D] after the block, which appends to `cache`; Q: the next tokens, beam by beam.

        `bias` hides later tokens and the histories of other beams.
        """

        def attend_self(y: Tensor) -> Tensor:
            return self.self_attention(y, bias=bias, rotate=rotate, cache=cache, state=state)

        def attend_memory(y: Tensor) -> Tensor:
            assert self.cross_attention is not None and cache.cross_keys is not None and cache.cross_values is not None
            return self.cross_attention(y, cache.cross_keys, cache.cross_values, bias=state.memory_bias)

        def transform(y: Tensor) -> Tensor:
            if state.n_beams == 1:
                return self.feed_forward(y, None, cache.history)
            rows = y.reshape(state.n_rows, -1, y.shape[2])  # [N, T, D]
            return self.feed_forward(rows, None, cache.history).reshape(y.shape)

        def compute() -> Tensor:
            y = self.self_attention_residual(x, attend_self)
            if self.cross_attention_residual is not None:
                y = self.cross_attention_residual(y, attend_memory)
            return self.feed_forward_residual(y, transform)

        return _computed(self, compute, x, cache.cross_keys, cache.cross_values)


_TAPED = (  # exactly these: a subclass may compute something else
    EncoderBlock, DecoderBlock, PostNorm, PreNorm, *_KNOWN, SelfAttention, CrossAttention, FullProjection, FeedForward,
    Linear, Dropout,
)  # fmt: skip
_HOOKS_OF_ALL = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


def _computed(block: EncoderBlock | DecoderBlock, compute: Callable[[], Tensor], *inputs: Tensor | None) -> Tensor:
    """What `compute` returns, by a tape where calls of the library wait, and operators are all that computes."""
    dtype = kernels.dtype_in_use()
    parameters: list[nn.Parameter] = []
    if (
        not is_open()
        or not torch.is_grad_enabled()
        or block.untaped is dtype
        or any(_HOOKS_OF_ALL)
        or not _takes_tape(block, parameters)
    ):
        return compute()
    generator = torch.get_rng_state()
    try:
        return taped(compute, [x for x in inputs if x is not None], parameters)
    except NotTaped:
        torch.set_rng_state(generator)
        block.untaped = dtype
        return compute()


def _takes_tape(module: nn.Module, parameters: list[nn.Parameter]) -> bool:
    """Whether modules compute as their classes do, and nothing watches them; adds their parameters to the list."""
    if (
        type(module) not in _TAPED
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "attend" in module.__dict__  # of a recorder
        or "forward" in module.__dict__
    ):
        return False
    parameters += [p for p in module._parameters.values() if p is not None]
    return all(_takes_tape(one, parameters) for one in module._modules.values() if one is not None)


class Stack(nn.Module):
    """N blocks, and after the last one a norm, if their residual connection needs one."""

    def __init__(self, blocks: Iterable[nn.Module], *, norm: nn.Module) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(blocks)
        self.norm = norm


class Encoder(Stack):
    """Every position attends to those that are not padding, as far as its layer's pattern allows."""

    def __init__(
        self, blocks: Iterable[EncoderBlock], *, norm: nn.Module, patterns: Sequence[FullPattern] = ()
    ) -> None:
        """`patterns`: of the layers, one after another and again from the first."""
        super().__init__(blocks, norm=norm)
        self.patterns = tuple(patterns) or (FullPattern(),)

    def forward(
        self, x: Float[Tensor, "B S D"], *, mask: Bool[Tensor, "B 1 S"], positions: Positions
    ) -> Float[Tensor, "B S D"]:
        """The embedded sequences after all blocks; `mask` is False at padding."""
        keep = mask.transpose(1, 2)  # [B, S, 1]
        places = torch.arange(x.shape[1], device=x.device)
        biases = [padded_bias(pattern, places, positions, mask) for pattern in self.patterns]
        rotate = positions.rotation(places)
        for block, bias in zip(self.blocks, cycle(biases), strict=False):
            x = block(x, bias=bias, keep=keep, rotate=rotate)
        return self.norm(x)


class Decoder(Stack):
    """Every position attends to itself, to earlier ones as its layer's pattern allows, and to the memory if any.

    With recurrent units in place of self-attention the patterns are not used.
    """

    def __init__(
        self, blocks: Iterable[DecoderBlock], *, norm: nn.Module, patterns: Sequence[FullPattern] = ()
    ) -> None:
        """`patterns`: of the layers, one after another and again from the first."""
        super().__init__(blocks, norm=norm)
        self.patterns = tuple(patterns) or (CausalPattern(),)

    def start(
        self,
        memory: Float[Tensor, "B S D"],
        mask: Bool[Tensor, "B 1 S"],
        *,
        capacity: int,
        n_beams: int,
    ) -> DecoderState:
        """The state before the first token: the memory's keys and values, and room for `capacity` tokens per row.

        With capacity 0 the state caches nothing and takes one step. Blocks without cross-attention use only the batch
        size of the memory, whose length may be 0.
        """
        layers = []
        for block in self.blocks:
            own, cross = block.self_attention, block.cross_attention
            keys = values = None
            if capacity and isinstance(own, SelfAttention):
                shape = (len(memory), own.n_kv_heads, capacity * n_beams)
                keys, values = (memory.new_empty(*shape, width) for width in (own.d_key, own.d_head))
            cross_keys, cross_values = (None, None) if cross is None else cross.key_value(memory)
            layers.append(LayerCache(keys=keys, values=values, cross_keys=cross_keys, cross_values=cross_values))
        return DecoderState(layers=layers, memory_bias=attention_bias(mask), n_beams=n_beams)

    def forward(
        self,
        x: Float[Tensor, "N T D"],
        state: DecoderState,
        *,
        positions: Positions,
        documents: Int[Tensor, "N T"] | None = None,
    ) -> Float[Tensor, "N T D"]:
        """The next T embedded tokens of every row after all blocks; the state advances in place.

        `documents`: the number of each token's document, for the first step of one beam; attention stays inside them.
        """
        rows = x.shape[:2]
        queries, keys = state.place(rows[1])
        biases = state.biases(self.patterns, queries, keys, positions, documents)
        rotate = positions.rotation(queries)
        x = x.unflatten(0, (-1, state.n_beams)).flatten(1, 2)  # [B, beams * T, D]
        for block, cache, bias in zip(self.blocks, state.layers, cycle(biases), strict=False):
            x = block(x, bias=bias, rotate=rotate, cache=cache, state=state)
        state.length += rows[1]
        return self.norm(x).reshape(*rows, -1)
