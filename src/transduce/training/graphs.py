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
from transduce.kernels.products import rounded_rows
from transduce.nn.state import Carry
from transduce.text.special import PAD

Results = tuple[Tensor, Tensor, Carry]
Passes = Callable[[TrainingBatch], Results]
"""Adds the gradients of a batch's sum of losses; returns the sums of loss and -log p, and an empty carry."""

_MAX_GRAPHS = 512  # each graph takes a few megabytes
_LENGTH_MULTIPLE = 4  # lengths are padded to a multiple of this, up to the model's limit


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    batch: RowBatch  # the input buffers
    results: Results


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

    def run(self, passes: Passes, batch: TrainingBatch) -> Results:
        """Run `passes`, the same function in every call, for a batch; return its results."""
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
        return known.results

    def _capture(self, passes: Passes, batch: RowBatch) -> _Graph:
        """Capture a graph that reads this batch. All graphs share memory, as one is in use at a time."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.stream(torch.cuda.current_stream())  # restores the stream after a failed capture
        # Another thread sends batches to the GPU meanwhile, which the mode "global" would not allow.
        capture = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        error: Exception | None = None
        try:
            with stream, capture:
                try:
                    results = passes(batch)
                except Exception as first:
                    error = first
                    raise
        except Exception as last:
            raise error or last from None  # the last error only says that the capture failed
        return _Graph(graph, batch, results)


def padded_to_recur(batch: TrainingBatch, *, longest: int | None) -> RowBatch:
    """Pad the inputs and targets of a batch at their ends, to a shape that many batches have."""
    rows = rounded_rows(batch.n_rows, least=1)

    def padded(x: Tensor) -> Tensor:
        length = -(-x.shape[1] // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        if longest is not None:
            length = max(x.shape[1], min(length, longest))
        whole = x.new_full((rows, length, *x.shape[2:]), torch.nan if x.is_floating_point() else PAD)  # as in batches
        whole[: x.shape[0], : x.shape[1]] = x
        return whole

    return RowBatch(tuple(map(padded, batch.inputs)), padded(batch.targets), batch.n_targets)
