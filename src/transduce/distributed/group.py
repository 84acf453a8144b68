"""Data-parallel training with torch.distributed, on one machine or several.

Every rank computes the gradients of its share of each update's sentences. Gradients are summed over all ranks and
divided once, by the number of targets of the whole update (`Updater`).

After every update the ranks agree on whether a signal asked one of them to stop, and on the clock of the main process.
So all of them stop, save and finish at the same update.

`training.parallel` decides whether a rank has a copy of the model (`Replicas`) or a shard of each weight (`Shards`).
DistributedDataParallel makes copies too, but it cannot repeat a backward pass that ran out of memory on one rank, and
needs a batch on every rank. Shards are PyTorch's FSDP2: every rank has a shard of each weight, its gradient and its
optimizer state. The blocks of encoders and decoders are gathered one by one when they compute. All other weights, such
as embeddings, are gathered for the whole forward and backward pass. With several machines, each machine has all shards
(HSDP), so that only sums of gradients cross the network.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, final

import torch
import torch.distributed.nn.functional  # imported later, by an optimizer, it would keep the process group alive
from torch import Tensor, distributed, nn

from transduce.distributed.launch import ProcessRank, this_process
from transduce.errors import RankExited, RankStuck, SettingsError, TransduceError
from transduce.nn.attention import CrossAttention
from transduce.nn.stack import Decoder, Encoder
from transduce.runs.tensors import gather
from transduce.training.ranks import SINGLE_RANK, Ranks, gradient_norm, name_on_rank

T = TypeVar("T")

BUCKET_BYTES = 25 << 20  # as in DistributedDataParallel


@final
class Replicas:
    """Copies of a model, one in each rank, whose gradients are summed over all ranks.

    Gradients are summed in buckets, each as soon as the last backward pass of an update has filled it. Buckets contain
    the parameters in reverse order, roughly the order of the backward pass, and all ranks sum them in this order. If a
    backward pass is repeated, sums that have already started are kept; they belong to the same sentences, with other
    random numbers of dropout.
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
        """Context manager for a micro-batch's passes; in the `last` one of an update, full buckets are summed."""
        self._missing = [len(bucket) for bucket in self._buckets] if last else []
        try:
            yield
        finally:
            self._missing = []

    def finish(self, sums: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Wait until gradients and `sums` are summed over all ranks; return the summed `sums`, then the gradient norm.

        A rank without a sentence adds zeros.
        """
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
        """Count a gradient of bucket `number`, and start to sum complete buckets; `finish` sums the last bucket."""
        if self._missing:
            self._missing[number] -= 1
            while (n := len(self._works)) + 1 < len(self._buckets) and not self._missing[n]:
                self._sum(())

    def _sum(self, more: Sequence[Tensor]) -> None:
        """Start to sum the next bucket, together with the tensors `more`, over all ranks."""
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
    """Raise `RankExited` if the weights differ between ranks, as a checksum of each tensor's bits shows."""
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
    """A model whose parameters are replaced by shards: PyTorch's `fully_shard` (FSDP2)."""

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
        """Context manager for a micro-batch's passes, after each of which gradients are reduced to shards.

        Unsharded gradients would need as much memory as the model.
        """
        yield
        self._model.reshard()  # after a forward pass without gradients; the loss has used the output matrix

    def finish(self, sums: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return the totals of `sums` over all ranks, then the norm of the whole gradient."""
        square = gradient_norm(parameters).square() / self._n_copies
        total = torch.stack([*(value.detach().float() for value in sums), square])
        distributed.all_reduce(total)
        *summed, square = total.unbind()
        return [*summed, square.sqrt()]

    @contextlib.contextmanager
    def whole(self, model: nn.Module) -> Iterator[nn.Module]:
        """Context manager that yields a copy of the whole model, on the CPU, in the main process; elsewhere `model`."""
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
        """Drop references to the process group, which the mesh (kept by PyTorch's caches) and the model have."""
        vars(self._mesh).get("_pg_registry", {}).clear()
        for module in [*self._model.modules()]:
            vars(module).clear()

    def check_equal(self, weights: Mapping[str, Tensor]) -> None:
        """Check nothing, as each rank has other shards of the weights."""


def _units(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a model whose shards are gathered separately, inner modules first."""
    for module in model.modules():
        if isinstance(module, Encoder | Decoder):
            # A decoder computes the keys and values of the memory before its first block.
            yield from (part.key_value for part in module.modules() if isinstance(part, CrossAttention))
            yield from module.blocks


PARALLEL: dict[str, type[Replicas] | type[Shards]] = {"replicate": Replicas, "shard": Shards}
"""Classes by the value of the setting `training.parallel`."""

TEXT_TIMEOUT = timedelta(days=7)
"""Time that a worker waits at the start for the main process, which may read text for hours. Later, ranks wait
`training.timeout`. A rank that died is noticed at once, because its connections close."""


@final
class GroupRanks(Ranks):
    """One process of a training with several processes, as a rank.

    Messages are exchanged by gloo on the CPU, so that they do not wait for a GPU. Gradients on GPUs are summed by nccl.
    Each rank publishes the number of its last exchange and its activity, so that an error can name a stuck rank.
    """

    def __init__(self, process: ProcessRank) -> None:
        self.process, self.rank, self.size, self.local_size = process, process.rank, process.size, process.local_size
        with self._exchange():
            self._store, _, _ = next(distributed.rendezvous("env://", timeout=TEXT_TIMEOUT))
        self.started = False
        self._parallel: Replicas | Shards | None = None
        self._minutes, self._exchanges, self._activity = 0.0, 0, ""

    def start(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send the main process's message, `timeout` in minutes or the exit code `exit`, to the workers; return it."""
        self.started = True
        with self._exchange():
            if self.is_main_process:
                self._store.set("start", json.dumps(message))
            received: dict[str, Any] = json.loads(self._store.get("start"))
            if "exit" in received:
                self._store.set(f"read{self.rank}", "")
                if self.is_main_process:  # it may serve the store: wait until the workers have read the message
                    self._store.wait([f"read{rank}" for rank in range(self.size)], timedelta(seconds=10))
                return received
            self._minutes = received["timeout"]
            self.report_activity("starting")
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                store=distributed.PrefixStore("group", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(minutes=self._minutes),
            )
        return received

    def bind_device(self, device: torch.device) -> torch.device:
        """Return the device of this rank, a GPU with its number: the current GPU differs in the thread of batches."""
        if device.type == "cuda":
            device = torch.device("cuda", self.process.local_rank)
            torch.cuda.set_device(device)
        return device

    @property
    def parallel(self) -> Replicas | Shards:
        assert self._parallel is not None, "the model is not distributed"
        return self._parallel

    def distribute(self, model: nn.Module, device: torch.device, *, parallel: str, precision: str) -> None:
        self._parallel = PARALLEL[parallel](model, device, precision=precision, process=self.process)
        self.in_step = self._parallel.in_step

    def computing(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        return self.parallel.computing(last=last)

    def finish_reduction(self, sums: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        with self._exchange():
            return self.parallel.finish(sums, parameters)

    def whole(self, model: nn.Module) -> contextlib.AbstractContextManager[nn.Module]:
        return self.parallel.whole(model)

    def report_activity(self, activity: str) -> None:
        self._activity = activity
        self._store.set(f"rank{self.rank}", f"{self._exchanges} {activity}")

    def broadcast(self, make: Callable[[], T], *, source: int = 0) -> T:
        """See `Ranks.broadcast`; the value is sent as JSON, first its length, then its bytes."""
        content = json.dumps(make()).encode() if self.rank == source else b""
        length = torch.tensor([len(content)])
        with self._exchange():
            distributed.broadcast(length, src=source)
            data = torch.frombuffer(bytearray(content or int(length)), dtype=torch.uint8)
            distributed.broadcast(data, src=source)
        received: T = json.loads(bytes(data.numpy()))
        return received

    def agree(self, signal: int, seconds: float, *, is_writing: bool = False) -> tuple[int, float, bool]:
        """See `Ranks.agree`; of several signals, the largest number is returned."""
        status = torch.tensor([signal, seconds if self.is_main_process else 0.0, is_writing], dtype=torch.float64)
        with self._exchange():
            distributed.all_reduce(status, op=distributed.ReduceOp.MAX)
        number, agreed, any_is_writing = status.tolist()
        return int(number), agreed, bool(any_is_writing)

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Ranks.gather`; workers get only their own tensors."""
        gathered = dict(tensors)
        for name, tensor in tensors.items():
            with self._exchange():
                if self.is_main_process:
                    of_all = [torch.empty_like(tensor) for _ in range(self.size)]
                    distributed.gather(tensor, of_all)
                    gathered |= {name_on_rank(name, rank): value for rank, value in enumerate(of_all)}
                else:
                    distributed.gather(tensor)
        return gathered

    def check_equal(self, weights: Mapping[str, Tensor]) -> None:
        with self._exchange():
            self.parallel.check_equal(weights)

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[None]:
        """Context manager for an exchange between ranks; counts exchanges, so that an error can name a stuck rank."""
        with self.translating_errors():
            if distributed.is_initialized():
                self._exchanges += 1
                self.report_activity(self._activity)
            yield

    @contextlib.contextmanager
    def translating_errors(self) -> Iterator[None]:
        """Turn errors of torch.distributed in the `with` block into `RankExited` (or `RankStuck` after a timeout)."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, distributed.DistError) and "/gloo/" not in str(error):
                raise
            reason = str(error).splitlines()[0][:120]
            hint = f"run the same command again to resume from the last checkpoint ({reason})"
            if "timed out" in reason.lower():
                self._report_stuck_ranks(hint)
            raise RankExited(f"another process of this training exited; {hint}") from error

    def _report_stuck_ranks(self, hint: str) -> None:
        """Raise `RankStuck` in the first rank that is not stuck; it names the stuck ranks and their activities.

        A rank is stuck if it did not begin this exchange, or does not notice that the exchange takes too long.
        """
        self._exchanges += 1
        self.report_activity(self._activity)
        time.sleep(6 * self._minutes)  # a tenth of the timeout: other ranks came later and notice later
        posts = [self._store.get(f"rank{rank}").decode().partition(" ") for rank in range(self.size)]
        stuck = [rank for rank, (number, _, _) in enumerate(posts) if int(number) < self._exchanges]
        if self.rank == min({*range(self.size)}.difference(stuck)):
            named = ", ".join(f"process {rank + 1} of {self.size} ({posts[rank][2]})" for rank in stuck)
            raise RankStuck(f"no answer for {self._minutes:g} minutes (training.timeout) from {named}; {hint}")


@contextlib.contextmanager
def join_ranks() -> Iterator[Ranks]:
    """Context manager in which this process is a rank of the training that torchrun's environment variables describe.

    If the main process exits before `start`, the workers exit. No reference to the process group may remain at the end:
    its threads would free tensors while the interpreter exits, which aborts the process.
    """
    process = this_process()
    if process.size == 1:
        yield SINGLE_RANK
        return
    ranks, code = GroupRanks(process), 0
    try:
        with ranks.translating_errors():  # FSDP exchanges weights and gradients wherever the model computes
            yield ranks
    except BaseException as error:
        code = error.exit_code if isinstance(error, TransduceError) else 130 if type(error) is KeyboardInterrupt else 1
        cause: BaseException | None = error
        while cause is not None:  # frames keep the process group
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__context__
        raise
    finally:
        with contextlib.suppress(RankExited):
            if ranks.is_main_process and not ranks.started:
                ranks.start({"exit": code})
        if distributed.is_initialized():  # ranks that wait for this rank get an error
            distributed.destroy_process_group()
        if ranks._parallel is not None:
            ranks._parallel.close()
        del ranks._parallel
        gc.collect()  # FSDP keeps the process group in reference cycles


def check_devices(device: torch.device, n: int | None = None) -> None:
    """Raise `SettingsError` if `device` is a GPU and this machine has fewer GPUs than processes.

    `n`: number of processes (default: of this training, on this machine).
    """
    n, n_gpus = n or this_process().local_size, torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and n > n_gpus:
        raise SettingsError(f"{n} processes need {n} GPUs; PyTorch finds {n_gpus} here; ask for fewer, or for the CPU")
