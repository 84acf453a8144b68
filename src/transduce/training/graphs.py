"""CUDA graphs of the forward and backward passes of micro-batches.

An update of a small model starts hundreds of kernels that each take a few microseconds, and starting them takes the CPU
longer than computing takes the GPU. A graph starts them all at once, for batches of one shape. So batches are padded to
shapes that recur.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from transduce.data.batch import RowBatch, TrainingBatch
from transduce.nn.linear import rounded_rows
from transduce.text.special import PAD

Passes = Callable[[TrainingBatch, Tensor], tuple[Tensor, Tensor]]
"""Add the gradients of a batch, whose loss is divided by a number of targets; return the sums of loss and -log p."""

_MOST = 512  # graphs; each takes a few megabytes
_LENGTHS = 4  # lengths are multiples of this


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    batch: RowBatch  # what it reads
    sums: tuple[Tensor, Tensor]


class GraphedPasses:
    """The passes of a model on a GPU: of a shape for the first time as always, then as a graph.

    Both draw the same random numbers. The gradients must stay where they are: after they are removed, `clear` is due.
    """

    def __init__(self, passes: Passes, device: torch.device, *, longest: int | None) -> None:
        """`longest`: the longest sequence that the model takes, if there is a limit."""
        self._passes, self._longest = passes, longest
        self._n_targets = torch.ones((), device=device)
        self.clear()

    def clear(self) -> None:
        """Forget all graphs, and free their memory."""
        self._graphs: dict[tuple[torch.Size, ...], _Graph | None] = {}  # None: seen once
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, batch: TrainingBatch, n_targets: int) -> tuple[Tensor, Tensor]:
        """The sums of loss and -log p of a batch; its gradients are added."""
        batch = self._padded(batch)
        self._n_targets.fill_(n_targets)
        shape = tuple(x.shape for x in (*batch.inputs, batch.targets))
        if shape not in self._graphs:
            if len(self._graphs) < _MOST:
                self._graphs[shape] = None
            return self._passes(batch, self._n_targets)
        known = self._graphs[shape]
        if known is None:
            known = self._graphs[shape] = self._capture(batch)
        for own, given in zip((*known.batch.inputs, known.batch.targets), (*batch.inputs, batch.targets), strict=True):
            own.copy_(given)
        known.graph.replay()
        return known.sums

    def _padded(self, batch: TrainingBatch) -> RowBatch:
        rows = rounded_rows(batch.n_rows)

        def padded(x: Tensor) -> Tensor:
            length = -(-x.shape[1] // _LENGTHS) * _LENGTHS
            if self._longest is not None:
                length = max(x.shape[1], min(length, self._longest))
            whole = x.new_full((rows, length, *x.shape[2:]), torch.nan if x.is_floating_point() else PAD)
            whole[: x.shape[0], : x.shape[1]] = x
            return whole

        return RowBatch(tuple(map(padded, batch.inputs)), padded(batch.targets), batch.n_targets)

    def _capture(self, batch: RowBatch) -> _Graph:
        """A graph that reads this batch. Memory is shared with the other graphs: one is in use at a time."""
        graph = torch.cuda.CUDAGraph()
        # Another thread sends batches to the GPU meanwhile, which "global" would not allow.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            sums = self._passes(batch, self._n_targets)
        return _Graph(graph, batch, sums)
