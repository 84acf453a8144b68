"""Every rank has the whole model; gradients are summed during the backward pass.

DistributedDataParallel does this too, but it cannot repeat a backward pass that ran out of memory on one rank, and it
needs a batch on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor, distributed, nn

from transduce.distributed.environment import ProcessRank
from transduce.errors import RankExited
from transduce.training.ranks import gradient_norm

BUCKET_BYTES = 25 << 20  # as in DistributedDataParallel


@final
class Replicas:
    """Copies of a model, one in each rank.

    Gradients are summed in buckets, each as soon as the last backward pass of an update has filled it.
    Buckets have the parameters in reverse order, which is about that of the backward pass, and all ranks sum them in
    the same order. If a backward pass is repeated, the sums that were started remain: those of the same
    sentences, with other dropout.
    """

    in_step = False

    def __init__(self, model: nn.Module, device: torch.device, *, precision: str, process: ProcessRank) -> None:
        model.to(device)
        self._buckets = list(_fill_buckets(reversed([p for p in model.parameters() if p.requires_grad])))
        self._flats = [torch.empty(0)] * len(self._buckets)
        self._works: list[distributed.Work] = []  # of the first buckets
        self._missing: list[int] = []  # gradients of each bucket, in the last backward pass
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(self._count, number))

    @contextlib.contextmanager
    def computing(self, *, last: bool) -> Iterator[None]:
        """The `last` backward pass completes the gradients of this rank."""
        self._missing = [len(bucket) for bucket in self._buckets] if last else []
        try:
            yield
        finally:
            self._missing = []

    def finish(self, sums: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Wait for the gradients; return their norm after the summed `sums`. A rank without a sentence adds zeros."""
        while len(self._works) < len(self._buckets):
            self._sum(sums if len(self._works) + 1 == len(self._buckets) else ())
        works, self._works = self._works, []
        for work in works:
            work.wait()
        for bucket, flat in zip(self._buckets, self._flats, strict=True):
            start = 0
            for parameter in bucket:
                parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
                start += parameter.numel()
        norm = gradient_norm(parameters)
        return [*self._flats[-1][-len(sums) :].clone().unbind(), norm]

    def whole(self, model: nn.Module) -> contextlib.AbstractContextManager[nn.Module]:
        return contextlib.nullcontext(model)

    def close(self) -> None:
        pass

    def check_equal(self, weights: Mapping[str, Tensor]) -> None:
        check_equal(weights)

    def _count(self, number: int, _: Tensor) -> None:
        """Note a gradient, and sum the buckets that are complete. The last one waits for the sums of losses."""
        if self._missing:
            self._missing[number] -= 1
            while (n := len(self._works)) + 1 < len(self._buckets) and not self._missing[n]:
                self._sum(())

    def _sum(self, more: Sequence[Tensor]) -> None:
        """Start to sum the next bucket."""
        number = len(self._works)
        bucket = self._buckets[number]
        pieces = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket]
        pieces += [value.detach().float().reshape(1) for value in more]
        n, device = sum(map(torch.numel, pieces)), pieces[0].device
        if self._flats[number].numel() != n:
            self._flats[number] = torch.empty(n, device=device)
        torch.cat(pieces, out=self._flats[number])
        work = distributed.all_reduce(self._flats[number], async_op=True)
        assert work is not None
        self._works.append(work)


def check_equal(weights: Mapping[str, Tensor]) -> None:
    """Raise `RankExited` unless all ranks have the same bits, by a checksum of each tensor."""
    bits = (tensor.detach().view(torch.int32) for tensor in weights.values())
    sums = torch.stack([tensor.sum(dtype=torch.int64).cpu() for tensor in bits])
    extremes = torch.stack([sums, -sums])
    distributed.all_reduce(extremes, op=distributed.ReduceOp.MAX)
    differing = (extremes[0] != -extremes[1]).nonzero()[:, 0].tolist()
    if differing:
        raise RankExited(
            f"the processes have different weights: {list(weights)[differing[0]]} and {len(differing) - 1} more"
        )


def _fill_buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        bucket.append(parameter)
        if sum(p.numel() * p.element_size() for p in bucket) >= BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
