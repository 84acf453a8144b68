"""A model in every rank: a copy (`Replicas`), or a shard of each weight (`Shards`).

DistributedDataParallel makes copies too, but it cannot repeat a backward pass that ran out of memory on one rank, and
needs a batch on every rank. Shards are PyTorch's FSDP2: every rank has a shard of each weight, its gradient and its
optimizer state. The blocks of encoders and decoders are gathered one by one when they compute. Everything else, such as
embeddings and models of other layers, is gathered for the whole forward and backward pass. With several machines, each
has all shards (HSDP), so that only sums of gradients cross the network.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, distributed, nn

from transduce.distributed.launch import ProcessRank
from transduce.errors import RankExited
from transduce.nn.attention import CrossAttention
from transduce.nn.stack import Decoder, Encoder
from transduce.runs.shards import gather
from transduce.training.ranks import gradient_norm

BUCKET_BYTES = 25 << 20  # as in DistributedDataParallel


@final
class Replicas:
    """Copies of a model, one in each rank.

    Gradients are summed in buckets, each as soon as the last backward pass of an update has filled it.
    Buckets contain the parameters in reverse order, roughly the order of the backward pass, and all ranks sum them in
    this order. If a backward pass is repeated, sums that were already started are kept: they belong to the same
    sentences, with other dropout.
    """

    in_step = False

    def __init__(self, model: nn.Module, device: torch.device, *, precision: str, process: ProcessRank) -> None:
        model.to(device)
        self._buckets = list(_fill_buckets(reversed([p for p in model.parameters() if p.requires_grad])))
        self._flats = [torch.empty(0)] * len(self._buckets)
        self._works: list[distributed.Work] = []  # sums of the first buckets
        self._missing: list[int] = []  # gradients that each bucket still lacks in the last backward pass
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(self._count, number))

    @contextlib.contextmanager
    def computing(self, *, last: bool) -> Iterator[None]:
        """See `Ranks.computing`; the `last` backward pass completes the gradients of this rank."""
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
        """Count a gradient, and sum complete buckets. The last bucket waits for the sums of losses (`finish`)."""
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
    """Raise `RankExited` unless tensors are bit-identical in all ranks, by a checksum of each tensor."""
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


@final
class Shards:
    """The shards of a model, which `fully_shard` puts in place of its parameters."""

    in_step = True

    def __init__(self, model: nn.Module, device: torch.device, *, precision: str, process: ProcessRank) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # the gradients are tested
        self._model: Any = model
        check_equal(dict(model.named_parameters()))  # each rank keeps a different shard
        sizes = torch.tensor([process.local_size, -process.local_size])
        distributed.all_reduce(sizes, op=distributed.ReduceOp.MAX)  # meshes must be equal in all ranks
        is_even = not sizes.sum() and process.size % process.local_size == 0
        self._n_copies = process.size // process.local_size if is_even else 1
        shape = (process.size,) if self._n_copies == 1 else (self._n_copies, process.local_size)
        names = ("copies", "shards")[-len(shape) :]
        self._mesh = distributed.init_device_mesh(device.type, shape, mesh_dim_names=names)
        is_rounded = device.type == "cuda" and precision == "bfloat16"
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if is_rounded else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        nothing = {id(p): nn.Parameter(torch.empty(0), requires_grad=False) for p in model.parameters()}
        self._empty = copy.deepcopy(model, nothing).eval() if process.rank == 0 else None
        for unit in (*_units(model), model):
            sharded: Any = fully_shard(unit, mesh=self._mesh, mp_policy=policy, reshard_after_forward=unit is not model)
            sharded.set_gradient_divide_factor(1.0)  # `Updater` divides by the number of targets
            sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums

    @contextlib.contextmanager
    def computing(self, *, last: bool) -> Iterator[None]:
        """Reduce gradients after each backward pass: unsharded gradients need as much memory as the model."""
        yield
        self._model.reshard()  # after a forward pass without gradients; the loss has used the output matrix

    def finish(self, sums: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Sum `sums` over all ranks; also return the norm of all gradient shards."""
        square = gradient_norm(parameters).square() / self._n_copies
        total = torch.stack([*(value.detach().float() for value in sums), square])
        distributed.all_reduce(total)
        *summed, square = total.unbind()
        return [*summed, square.sqrt()]

    @contextlib.contextmanager
    def whole(self, model: nn.Module) -> Iterator[nn.Module]:
        """A copy of the whole model on the CPU in the main process; `model` itself in other ranks."""
        weights = gather(dict(model.named_parameters()), keep=self._empty is not None)
        if self._empty is None:
            yield model
            return
        for name, parameter in self._empty.named_parameters():
            parameter.data = weights.pop(name)
        try:
            yield self._empty
        finally:
            for parameter in self._empty.parameters():
                parameter.data = torch.empty(0)

    def close(self) -> None:
        """Drop references to the process group in caches of PyTorch (the mesh) and frames of errors (the model)."""
        vars(self._mesh).get("_pg_registry", {}).clear()
        for module in [*self._model.modules()]:
            vars(module).clear()

    def check_equal(self, weights: Mapping[str, Tensor]) -> None:
        """Ranks have different shards."""


def _units(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that are gathered on their own, inner ones first."""
    for module in model.modules():
        if isinstance(module, Encoder | Decoder):
            # A decoder computes the keys and values of the memory before its first block.
            yield from (part.key_value for part in module.modules() if isinstance(part, CrossAttention))
            yield from module.blocks


PARALLEL: dict[str, type[Replicas] | type[Shards]] = {"replicate": Replicas, "shard": Shards}
"""Classes for `training.parallel`."""
