"""Data-parallel training with torch.distributed, on one machine or several.

Every rank has the whole model, computes the gradients of its share of each update's sentences, and makes the same step:
gradients are sums over all targets of all ranks, divided once by their number (`Updater`).

After every update the ranks agree on whether a signal asked one of them to stop, and on the clock of the main process.
So all of them stop, save and finish at the same update.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch import Tensor, distributed

from transduce.distributed.environment import EXIT_RANK_LOST, ProcessRank, this_process
from transduce.errors import Interrupted, RankExited, SettingsError, TooLong, TrainingError, TransduceError
from transduce.logging import print_error
from transduce.process import limit_kernel_cache
from transduce.runs.folder import RunFolder
from transduce.training.ranks import SINGLE_RANK, Ranks, name_on_rank

T = TypeVar("T")
Learn = Callable[[RunFolder, Ranks, str], None]
"""Trains the model of a run folder with the other ranks, on the named device."""

TIMEOUT = timedelta(days=7)
"""How long a rank waits for one that is alive: the main process may read text or translate for hours. A rank that died
is noticed at once, because its connections close."""


@final
class GroupRanks(Ranks):
    """One of several ranks.

    Messages are exchanged by gloo on the CPU, so that nothing waits for a GPU: that is the default process group.
    Gradients on GPUs are summed by nccl.
    """

    def __init__(self, process: ProcessRank) -> None:
        self.process, self.rank, self.size, self.local_size = process, process.rank, process.size, process.local_size
        with _detect_lost_ranks():
            distributed.init_process_group("gloo", timeout=TIMEOUT)
        self.started = False
        self._gradients: distributed.ProcessGroup | None = None
        self._flat = torch.zeros(0)

    def start(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Broadcast the main process's message; what workers pass is ignored."""
        self.started = True
        return self.broadcast(lambda: dict(message))

    def bind_device(self, device: torch.device) -> torch.device:
        """Create the process group for gradients; each rank has its own GPU.

        The device has a number because the current GPU is set per thread, and batches come from another thread.
        """
        if device.type == "cuda":
            device = torch.device("cuda", self.process.local_rank)
            torch.cuda.set_device(device)
        with _detect_lost_ranks():
            backend = "nccl" if device.type == "cuda" else "gloo"
            self._gradients = distributed.new_group(backend=backend, timeout=TIMEOUT)
        return device

    def broadcast(self, make: Callable[[], T]) -> T:
        """Broadcast the length, then the JSON."""
        content = json.dumps(make()).encode() if self.is_main_process else b""
        length = torch.tensor([len(content)])
        with _detect_lost_ranks():
            distributed.broadcast(length, src=0)
            data = torch.frombuffer(bytearray(content or int(length)), dtype=torch.uint8)
            distributed.broadcast(data, src=0)
        received: T = json.loads(bytes(data.numpy()))
        return received

    def agree(self, signal: int, seconds: float) -> tuple[int, float]:
        """The largest signal number, if several were received."""
        status = torch.tensor([signal, seconds if self.is_main_process else 0.0], dtype=torch.float64)
        with _detect_lost_ranks():
            distributed.all_reduce(status, op=distributed.ReduceOp.MAX)
        number, agreed = status.tolist()
        return int(number), agreed

    def all_reduce(self, parameters: Sequence[torch.nn.Parameter], sums: Sequence[Tensor]) -> list[Tensor]:
        """Reduce one flat tensor of all gradients and sums.

        A rank without a sentence in this update adds zeros.
        """
        wanted = [p for p in parameters if p.requires_grad]
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in wanted]
        tail = torch.stack([value.detach().float() for value in sums])
        flat = self._flat_of([*pieces, tail])
        with _detect_lost_ranks():
            distributed.all_reduce(flat, group=self._gradients)
        *summed, tail = flat.split([piece.numel() for piece in [*pieces, tail]])
        for parameter, gradient in zip(wanted, summed, strict=True):
            parameter.grad = gradient.view_as(parameter)
        return list(tail.clone().unbind())

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Workers get their own tensors only."""
        found = dict(tensors)
        for name, tensor in tensors.items():
            with _detect_lost_ranks():
                if self.is_main_process:
                    of_all = [torch.empty_like(tensor) for _ in range(self.size)]
                    distributed.gather(tensor, of_all)
                    found |= {name_on_rank(name, rank): one for rank, one in enumerate(of_all)}
                else:
                    distributed.gather(tensor)
        return found

    def check_equal(self, weights: Mapping[str, Tensor]) -> None:
        """Compare a checksum of the bits of each tensor."""
        bits = (tensor.detach().view(torch.int32) for tensor in weights.values())
        sums = torch.stack([tensor.sum(dtype=torch.int64).cpu() for tensor in bits])
        extremes = torch.stack([sums, -sums])
        with _detect_lost_ranks():
            distributed.all_reduce(extremes, op=distributed.ReduceOp.MAX)
        differing = (extremes[0] != -extremes[1]).nonzero()[:, 0].tolist()
        if differing:
            raise RankExited(
                f"the processes have different weights: {list(weights)[differing[0]]} and {len(differing) - 1} more"
            )

    def _flat_of(self, pieces: Sequence[Tensor]) -> Tensor:
        """All pieces in one tensor, which is reused."""
        n, device = sum(piece.numel() for piece in pieces), pieces[0].device
        if self._flat.numel() != n or self._flat.device != device:
            self._flat = torch.empty(n, device=device)
        return torch.cat([piece.reshape(-1) for piece in pieces], out=self._flat)


@contextlib.contextmanager
def _detect_lost_ranks() -> Iterator[None]:
    """Turn errors of torch.distributed into `RankExited`: another process is gone."""
    try:
        yield
    except RuntimeError as error:
        raise RankExited(
            "another process of this training exited; run the same command again to resume from the last checkpoint "
            f"({str(error).splitlines()[0][:120]})"
        ) from error


@contextlib.contextmanager
def join_ranks() -> Iterator[Ranks]:
    """The ranks of this training, as the environment says. If the main process exits before `start`, workers exit."""
    process = this_process()
    if process.size == 1:
        yield SINGLE_RANK
        return
    ranks, code = GroupRanks(process), 0
    try:
        yield ranks
    except BaseException as error:
        code = error.exit_code if isinstance(error, TransduceError) else 130 if type(error) is KeyboardInterrupt else 1
        raise
    finally:
        with contextlib.suppress(RankExited):
            if ranks.is_main_process and not ranks.started:
                ranks.start({"exit": code})
        if distributed.is_initialized():  # ranks that wait for this one get an error
            distributed.destroy_process_group()


def run_worker(learn: Learn) -> int:
    """Wait for the main process and train with it; return the exit code.

    Errors that all ranks see are reported by the main process, others here, with the number of this process.
    """
    limit_kernel_cache()
    try:
        with join_ranks() as ranks:
            message = ranks.start({})
            if "exit" in message:
                return int(message["exit"])
            folder = RunFolder.open(Path(message["folder"]), model=False)
            learn(folder, ranks, message["device"])
            return 0
    except RankExited:
        return EXIT_RANK_LOST
    except TransduceError as error:
        if isinstance(error, Interrupted | TrainingError) and not isinstance(error, TooLong):
            return error.exit_code
        process = this_process()
        print_error(f"process {process.rank + 1} of {process.size}: {error}")
        return error.exit_code


def check_devices(device: torch.device, n: int | None = None) -> None:
    """Refuse more processes than GPUs on this machine; `n` of them, or those that there are now."""
    n, n_gpus = n or this_process().local_size, torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and n > n_gpus:
        raise SettingsError(f"{n} processes need {n} GPUs; PyTorch finds {n_gpus} here; ask for fewer, or for the CPU")
