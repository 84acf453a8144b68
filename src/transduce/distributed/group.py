"""Data-parallel training with torch.distributed, on one machine or several.

Every rank computes the gradients of its share of each update's sentences. They are summed over all targets of all ranks
and divided once by their number (`Updater`). `training.parallel` decides whether each rank has a copy of the
model or a shard (PARALLEL).

After every update the ranks agree on whether a signal asked one of them to stop, and on the clock of the main process.
So all of them stop, save and finish at the same update.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, final

import torch
import torch.distributed.nn.functional  # imported later, by an optimizer, it would keep the process group alive
from torch import Tensor, distributed, nn

from transduce.distributed.launch import ProcessRank, this_process
from transduce.distributed.parallel import PARALLEL, Replicas, Shards
from transduce.errors import RankExited, RankStuck, SettingsError, TransduceError
from transduce.training.ranks import SINGLE_RANK, Ranks, name_on_rank

T = TypeVar("T")
TEXT_TIMEOUT = timedelta(days=7)
"""Time that a worker waits for the main process, which may read text for hours. Later ranks wait `training.timeout`. A
rank that died is noticed at once, because its connections close."""


@final
class GroupRanks(Ranks):
    """A process of a training in several processes.

    Messages are exchanged by gloo on the CPU, so that nothing waits for a GPU. Gradients on GPUs are summed by nccl.
    Each rank publishes the number of its last exchange and its activity, so that messages can name a stuck rank.
    """

    def __init__(self, process: ProcessRank) -> None:
        self.process, self.rank, self.size, self.local_size = process, process.rank, process.size, process.local_size
        with self._exchange():
            self._store, _, _ = next(distributed.rendezvous("env://", timeout=TEXT_TIMEOUT))
        self.started = False
        self._parallel: Replicas | Shards | None = None
        self._minutes, self._exchanges, self._activity = 0.0, 0, ""

    def start(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send the main process's message: `timeout`, in minutes, or `exit`. Messages of workers are ignored."""
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
        """Return the GPU of this rank, with its number.

        The number is needed because the current GPU is set per thread, and batches come from another thread.
        """
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
        """Broadcast a value as JSON: first its length, then its bytes."""
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
        """Context in which ranks exchange data. It counts the exchanges, so that messages can name a stuck rank."""
        with self.translating_errors():
            if distributed.is_initialized():
                self._exchanges += 1
                self.report_activity(self._activity)
            yield

    @contextlib.contextmanager
    def translating_errors(self) -> Iterator[None]:
        """Turn errors of torch.distributed into `RankExited`: another rank is gone, or does not answer."""
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
        """Raise `RankStuck` in the first rank that is not stuck.

        A rank is stuck if it did not come to this exchange, or does not notice that the exchange takes too long.
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
    """Join the ranks given by the environment. If the main process exits before `start`, the workers exit.

    No reference to the process group may remain at the end: its threads would free tensors while the interpreter exits,
    which aborts the process.
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
    """Refuse more processes than GPUs on this machine. `n`: number of processes (default: of this training)."""
    n, n_gpus = n or this_process().local_size, torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and n > n_gpus:
        raise SettingsError(f"{n} processes need {n} GPUs; PyTorch finds {n_gpus} here; ask for fewer, or for the CPU")
