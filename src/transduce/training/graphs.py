"""CUDA graphs of the forward and backward passes of micro-batches.

An update of a small model launches hundreds of kernels that each take a few microseconds, and launching them takes the
CPU longer than running them takes the GPU. A CUDA graph launches them all at once, for batches of one shape. So batches
are padded to shapes that recur.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from transduce.data.batch import RowBatch, TrainingBatch
from transduce.nn.linear import rounded_rows
from transduce.text.special import PAD

Passes = Callable[[TrainingBatch], tuple[Tensor, Tensor]]
"""Of a batch: add the gradients of the sum of losses, return the sums of loss and -log p."""

_MAX_GRAPHS = 512  # each takes a few megabytes
_LENGTH_MULTIPLE = 4  # unless the model takes no longer sequences


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    batch: RowBatch  # the input buffers
    sums: tuple[Tensor, Tensor]


class GraphedPasses:
    """Run the forward and backward pass of one model on a GPU, as a CUDA graph where possible.

    The first batch of a shape runs eagerly, the second is captured, later ones are replayed. After `_MAX_GRAPHS`
    shapes, new ones always run eagerly. Dropout draws the same random numbers either way. From the first batch on, the
    gradients must stay where they are in memory.
    """

    def __init__(self, *, longest: int | None) -> None:
        """`longest`: the longest sequence that the model takes, if there is a limit."""
        self._longest = longest
        self._graphs: dict[tuple[torch.Size, ...], _Graph | None] = {}  # None: seen once
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, passes: Passes, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Add the gradients of a batch as `passes` does, the same function in every call; return the sums."""
        batch = padded_to_recur(batch, longest=self._longest)
        shape = tuple(x.shape for x in (*batch.inputs, batch.targets))
        if shape not in self._graphs:
            if len(self._graphs) < _MAX_GRAPHS:
                self._graphs[shape] = None
            return passes(batch)
        known = self._graphs[shape]
        if known is None:
            known = self._graphs[shape] = self._capture(passes, batch)
        for own, given in zip((*known.batch.inputs, known.batch.targets), (*batch.inputs, batch.targets), strict=True):
            own.copy_(given)
        known.graph.replay()
        return known.sums

    def _capture(self, passes: Passes, batch: RowBatch) -> _Graph:
        """A graph that reads this batch. Memory is shared with the other graphs: one is in use at a time."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.stream(torch.cuda.current_stream())  # restored after a capture that fails
        # Another thread sends batches to the GPU meanwhile, which "global" would not allow.
        capture = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        error: Exception | None = None
        try:
            with stream, capture:
                try:
                    sums = passes(batch)
                except Exception as first:
                    error = first
                    raise
        except Exception as last:
            raise error or last from None  # the last one only says that the capture failed
        return _Graph(graph, batch, sums)


def padded_to_recur(batch: TrainingBatch, *, longest: int | None) -> RowBatch:
    """The inputs and targets of a batch in a shape that many batches have, with padding behind them."""
    rows = rounded_rows(batch.n_rows, least=1)

    def padded(x: Tensor) -> Tensor:
        length = -(-x.shape[1] // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        if longest is not None:
            length = max(x.shape[1], min(length, longest))
        whole = x.new_full((rows, length, *x.shape[2:]), torch.nan if x.is_floating_point() else PAD)  # as in batches
        whole[: x.shape[0], : x.shape[1]] = x
        return whole

    return RowBatch(tuple(map(padded, batch.inputs)), padded(batch.targets), batch.n_targets)
