"""Low-rank adapters on frozen weights (LoRA, Hu et al. 2021, arXiv 2106.09685), and recomputation of activations."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from transduce.nn.attention import CrossAttention, FullProjection, SelfAttention
from transduce.nn.embedding import TokenTable
from transduce.nn.feedforward import FeedForward, GatedFeedForward
from transduce.nn.loss import frozen_label_smoothed_loss
from transduce.nn.stack import Stack

_ROWS_AT_ONCE = 1 << 14
"""Number of table rows converted to another type at a time, as a copy of the whole table may not fit in memory."""


class LowRank(nn.Module):
    """The matrices A and B of an adapter. B is initially zero, so that the adapter changes nothing (section 4.1)."""

    def __init__(self, n_inputs: int, n_outputs: int, rank: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, n_inputs))
        self.b = nn.Parameter(torch.zeros(n_outputs, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))


class _Widened(torch.autograd.Function):
    """The product x W^T for a frozen W stored in fewer bits than x; the backward pass keeps only the stored W."""

    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(weight)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (weight,) = ctx.saved_tensors
        return grad @ weight.to(grad.dtype), None


class AdaptedLinear(nn.Linear):
    """A frozen linear layer with adapters: W x + b + scale * B A x, with one adapter per matrix packed in its weight.

    A layer whose weight is only stored in fewer bits has no adapters.
    """

    adapters: nn.ModuleList
    scale: float
    linear: Callable[..., Tensor] = staticmethod(F.linear)
    """Computes x W^T + b; a subclass may replace it by a faster function."""

    def forward(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        if self.weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type):
            y = self.linear(x, self.weight, self.bias)
        else:
            y = _Widened.apply(x, self.weight)
            y = y if self.bias is None else y + self.bias
        parts: list[Any] = [*self.adapters]
        changes = [self.linear(self.linear(x, part.a), part.b) for part in parts]
        return y + self.scale * torch.cat(changes, -1) if changes else y


class AdaptedProjection(FullProjection, AdaptedLinear):  # type: ignore[misc]
    """A frozen attention projection with an adapter for each matrix (queries, keys, values) packed in its weight."""


class AdaptedTable(TokenTable):
    """A frozen embedding table, followed by trained rows `new` for tokens added to the vocabulary."""

    new: nn.Parameter | None

    def forward(self, ids: Int[Tensor, "*B"]) -> Float[Tensor, "*B D"]:
        n = len(self.weight)
        vectors = F.embedding(ids.clamp(max=n - 1), self.weight).float()
        if self.new is None:
            return vectors
        return torch.where((ids < n)[..., None], vectors, F.embedding((ids - n).clamp(min=0), self.new))

    def logits(self, hidden: Float[Tensor, "*B D"], bias: Float[Tensor, " V"] | None) -> Float[Tensor, "*B V"]:
        parts = [self.weight] if self.weight.dtype == hidden.dtype else self.weight.split(_ROWS_AT_ONCE)
        parts = [*parts, *([] if self.new is None else [self.new])]
        logits = torch.cat([self.linear(hidden, part.to(hidden.dtype)) for part in parts], -1)
        return logits if bias is None else logits + bias

    def loss(
        self,
        hidden: Float[Tensor, "B T D"],
        targets: Int[Tensor, "B T"],
        *,
        bias: Float[Tensor, " V"] | None = None,
        smoothing: float = 0.1,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Int[Tensor, ""]]:
        return frozen_label_smoothed_loss(hidden, self.weight, self.new, targets, bias=bias, smoothing=smoothing)


_ADAPTED: dict[type[nn.Module], type[AdaptedLinear]] = {nn.Linear: AdaptedLinear, FullProjection: AdaptedProjection}
_ATTENTION, _FEED_FORWARD = (SelfAttention, CrossAttention), (FeedForward, GatedFeedForward)
PLACES: dict[str, tuple[type[nn.Module], ...]] = {"attention": _ATTENTION, "all": (*_ATTENTION, *_FEED_FORWARD)}
"""Classes of modules whose linear layers get adapters, by the argument `on` of `add_adapters`."""


def add_adapters(
    model: nn.Module,
    *,
    rank: int,
    scale: float,
    on: str,
    dtype: torch.dtype,
    new_rows: Mapping[str, int],
    trained: Collection[str],
) -> None:
    """Freeze a model and add an adapter to each matrix of some of its layers.

    Args:
        model: Changed in place. Its layers keep their names and weights; the parameters of an adapter are called
            `LAYER.adapters.N.a` and `.b`, N being the number of the matrix inside the layer's weight.
        rank: Rank of the adapters: A has this many rows.
        scale: Factor of the adapters' products, alpha / rank in the paper (section 4.1).
        on: Layers that get adapters: "attention" or "all".
        dtype: Type in which the frozen matrices of blocks and tables are stored. Norms and biases keep their types.
        new_rows: For tables with new tokens, the number of last rows to train, by the name of the table's weight.
        trained: Names of other parameters to train, such as those of a new output layer.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    for parent in list(model.modules()):
        for name, layer in parent.named_children() if type(parent) in PLACES["all"] else ():
            is_adapted = type(parent) in PLACES[on]
            if type(layer) in _ADAPTED and (is_adapted or layer.weight.dtype != dtype):
                n_packed = parent.n_packed if isinstance(parent, FeedForward) and name == "expand" else 1
                _adapt(layer, rank=rank if is_adapted else 0, scale=scale, n_packed=n_packed, dtype=dtype)
    new = dict[int, nn.Parameter]()  # by the id of the weight, which several tables may share
    for name, table in list(model.named_modules()):
        if type(table) is TokenTable and not table.weight.requires_grad:
            _freeze(table, new_rows.get(f"{name}.weight", 0), new, dtype=dtype)


def _adapt(layer: Any, *, rank: int, scale: float, n_packed: int, dtype: torch.dtype) -> None:
    """Turn a linear layer, whose weight packs `n_packed` matrices, into an adapted layer; rank 0 adds no adapters."""
    rows: Sequence[int] = getattr(layer, "rows", ()) or (layer.out_features // n_packed,) * n_packed
    layer.__class__ = _ADAPTED[type(layer)]
    layer.adapters = nn.ModuleList(LowRank(layer.in_features, n, rank) for n in rows if rank)
    layer.scale = scale
    layer.weight.data = layer.weight.data.to(dtype)


def _freeze(table: Any, n_new: int, new: dict[int, nn.Parameter], *, dtype: torch.dtype) -> None:
    """Turn a table into an `AdaptedTable`, in place, whose last `n_new` rows become a separate, trained parameter.

    `new`: the parameters of new rows by the identity of the table's weight, which several tables may share.
    """
    table.__class__, weight = AdaptedTable, table.weight
    if n_new and id(weight) not in new:
        new[id(weight)] = nn.Parameter(weight.data[-n_new:].clone())
        weight.data = weight.data[:-n_new]
    weight.data = weight.data.to(dtype)
    table.new = new.get(id(weight))


def recompute_blocks(model: nn.Module) -> None:
    """Make the blocks of all stacks keep only their inputs in training and recompute activations for the backward pass.

    The activations of only about one block are then in memory at a time (Chen et al. 2016, arXiv 1604.06174).
    """
    for stack in model.modules():
        for block in stack.blocks if isinstance(stack, Stack) else ():
            block.__class__ = _recomputed(type(block))


def _recomputed(block: type[Any]) -> type[Any]:
    """Return a subclass of a block's class that computes the forward pass again for the backward pass."""

    class Recomputed(block):
        def forward(self, x: Tensor, **options: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return super().forward(x, **options)
            output: Tensor = checkpoint(self._run, x, options, use_reentrant=False)
            return output

        def _run(self, x: Tensor, options: Mapping[str, Any]) -> Tensor:
            """Run the block with a copy of its cache, so that the original is still empty when the block is rerun."""
            if (cache := options.get("cache")) is not None:
                options = {**options, "cache": (own := copy.copy(cache))}
                own.history = [*cache.history]
            return super().forward(x, **options)

    return Recomputed
