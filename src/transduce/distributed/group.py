"""What joins the processes that train one model together: data-parallel, on one machine or several.

Every process has the whole model, takes its share of each update's sentences, and makes the same step: gradients are
sums over all targets of all processes, divided once by the number of them all (`Updater`). The first process reads,
writes and speaks for all. The loop asks its `Ranks`; for a process on its own, `SingleRank`, the answers cost nothing.

Between two updates the processes know of each other what one word holds: whether a signal has asked one of them to
stop, and the clock of the first. It goes along with the gradients, so all stop, save and end at the same update.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from transduce.distributed.environment import ProcessRank, this_process
from transduce.errors import RankExited, SettingsError, TransduceError
from transduce.runs.folder import RunFolder
from transduce.training.ranks import SINGLE_RANK, Ranks, dropout_seed, name_on_rank
from transduce.training.schedule import Clock
from transduce.training.stopping import StopRequest

T = TypeVar("T")

PATIENCE = timedelta(days=7)
"""How long a process waits for another that lives: one may read text, or translate, for hours. A dead one is noticed
at once, as its connections close."""


class _AgreedClock(Clock):
    """Shows what the first process's clock showed at the last word."""

    def __init__(self, used: float) -> None:
        super().__init__(used)
        self.agreed = used

    def seconds(self) -> float:
        return self.agreed

    def own(self) -> float:
        """Seconds by this process's own clock."""
        return super().seconds()


class GroupRanks(Ranks):
    """One of several processes, connected by torch.distributed.

    Words and messages go by gloo on the CPU whatever the device, so that nothing has to wait for a GPU; gradients by
    nccl where they lie on GPUs.
    """

    def __init__(self, process: ProcessRank) -> None:
        """Meet the others. The default group is that of messages."""
        self.process, self.rank, self.size, self.local_size = process, process.rank, process.size, process.local_size
        store = None if process.rendezvous is None else distributed.FileStore(str(process.rendezvous), process.size)
        with _noticing():
            distributed.init_process_group(
                "gloo",
                store=store,
                rank=-1 if store is None else process.rank,
                world_size=-1 if store is None else process.size,
                timeout=PATIENCE,
            )
        self.started = False
        self._gradients: distributed.ProcessGroup | None = None
        self._flat = torch.zeros(0)
        self._clock = _AgreedClock(0.0)
        self._own_request, self._request = StopRequest(), StopRequest()

    def start(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Told by the first process, waited for by the others, who give anything."""
        self.started = True
        return self.broadcast(lambda: dict(message))

    def bind_device(self, device: torch.device) -> torch.device:
        """Make the group of the gradients. Of several GPUs each process has its own.

        It is named by its number: which GPU is the current one is a thread's own, and batches come from another thread.
        """
        if device.type == "cuda":
            device = torch.device("cuda", self.process.local_rank)
            torch.cuda.set_device(device)
        with _noticing():
            backend = "nccl" if device.type == "cuda" else "gloo"
            self._gradients = distributed.new_group(backend=backend, timeout=PATIENCE)
        return device

    def broadcast(self, make: Callable[[], T]) -> T:
        """Two broadcasts: how long it is, and the JSON."""
        content = json.dumps(make()).encode() if self.is_main_process else b""
        length = torch.tensor([len(content)])
        with _noticing():
            distributed.broadcast(length, src=0)
            data = torch.zeros(int(length), dtype=torch.uint8)
            if self.is_main_process:
                data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            distributed.broadcast(data, src=0)
        self.barrier()
        told: T = json.loads(bytes(data.numpy()))
        return told

    def barrier(self) -> None:
        """A word alone."""
        with _noticing():
            word = self._word()
            distributed.all_reduce(word, op=distributed.ReduceOp.MAX)
            self._hear(word)

    def all_reduce(self, parameters: Sequence[torch.nn.Parameter], sums: Sequence[Tensor]) -> list[Tensor]:
        """One flat tensor of all gradients, with the sums behind; meanwhile, the word.

        A process that had no sentence of an update adds zeros.
        """
        wanted = [p for p in parameters if p.requires_grad]
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in wanted]
        tail = torch.stack([value.detach().float() for value in sums])
        flat = self._flat_of([*pieces, tail])
        with _noticing():
            word = self._word()
            heard = distributed.all_reduce(word, op=distributed.ReduceOp.MAX, async_op=True)
            distributed.all_reduce(flat, group=self._gradients)
            heard.wait()
        self._hear(word)
        *summed, tail = flat.split([piece.numel() for piece in [*pieces, tail]])
        for parameter, gradient in zip(wanted, summed, strict=True):
            parameter.grad = gradient.view_as(parameter)
        return list(tail.clone().unbind())

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Only the first process gets those of the others."""
        found = dict(tensors)
        for name, tensor in tensors.items():
            with _noticing():
                if self.is_main_process:
                    of_all = [torch.empty_like(tensor) for _ in range(self.size)]
                    distributed.gather(tensor, of_all)
                    found |= {name_on_rank(name, rank): one for rank, one in enumerate(of_all)}
                else:
                    distributed.gather(tensor)
        return found

    def check_equal(self, weights: Mapping[str, Tensor]) -> None:
        """By a checksum of the bits of each tensor."""
        sums = torch.stack(
            [tensor.detach().view(torch.int32).sum(dtype=torch.int64).cpu() for tensor in weights.values()]
        )
        extremes = torch.stack([sums, -sums])
        with _noticing():
            distributed.all_reduce(extremes, op=distributed.ReduceOp.MAX)
        differing = (extremes[0] != -extremes[1]).nonzero()[:, 0].tolist()
        if differing:
            raise RankExited(
                f"the processes have different weights: {list(weights)[differing[0]]} and {len(differing) - 1} more"
            )

    def clock(self, used: float) -> Clock:
        """The first process's, as of the last word."""
        self._clock = _AgreedClock(used)
        return self._clock

    def share_stop_request(self, request: StopRequest) -> StopRequest:
        """The first signal of any process, as of the last word."""
        self._own_request, self._request = request, StopRequest()
        return self._request

    def seed_dropout(self, seed: int) -> None:
        """One of its own."""
        torch.manual_seed(dropout_seed(seed, 0, self.rank))

    def close(self) -> None:
        """Leave the others: who waits for this process learns of it."""
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def _word(self) -> Tensor:
        number = signal.Signals[self._own_request.name].value if self._own_request else 0
        return torch.tensor([number, self._clock.own() if self.is_main_process else 0.0], dtype=torch.float64)

    def _hear(self, word: Tensor) -> None:
        number, self._clock.agreed = word.tolist()
        if number and not self._request:
            self._request.number, self._request.name = int(number), signal.Signals(int(number)).name

    def _flat_of(self, pieces: Sequence[Tensor]) -> Tensor:
        """All pieces in one tensor, which is kept for the next time."""
        n, device = sum(piece.numel() for piece in pieces), pieces[0].device
        if self._flat.numel() != n or self._flat.device != device:
            self._flat = torch.empty(n, device=device)
        return torch.cat([piece.reshape(-1) for piece in pieces], out=self._flat)


@contextlib.contextmanager
def _noticing() -> Iterator[None]:
    """An error of torch.distributed means that another process is gone."""
    try:
        yield
    except RuntimeError as error:
        raise RankExited(
            "another process of this training has ended; the same command goes on from the last checkpoint "
            f"({str(error).splitlines()[0][:120]})"
        ) from error


class WorkerRunFolder(RunFolder):
    """The folder of a run that another process writes."""

    def save_model(self, tensors: Mapping[str, Tensor]) -> None:
        """Not here."""

    def save_checkpoint(self, update: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Not here."""
        return self.path

    def prune(self, keep: int, *, spare: Collection[int] = ()) -> list[Path]:
        """Not here."""
        return []


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
    except TransduceError as error:
        code = error.exit_code
        raise
    except BaseException as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        raise
    finally:
        with contextlib.suppress(RankExited):
            if ranks.is_main_process and not ranks.started:
                ranks.start({"exit": code})
        ranks.close()


def check_devices(device: torch.device, n: int | None = None) -> None:
    """Refuse more processes than GPUs on this machine; `n` of them, or those that there are now."""
    n, n_gpus = n or this_process().local_size, torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and n > n_gpus:
        raise SettingsError(f"{n} processes need {n} GPUs; PyTorch finds {n_gpus} here; ask for fewer, or for the CPU")
