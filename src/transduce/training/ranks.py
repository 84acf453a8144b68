"""The processes (ranks) that train one model together, as the training loop sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from transduce.kernels.optimizer import norm, reaches
from transduce.runs.tensors import shard_of

T = TypeVar("T")


class Ranks:
    """A process as one rank of a training, and its communication with the other ranks.

    `rank` is the number of the process among `size`, of which `local_size` are on this machine. The methods here are
    for a process that trains alone (SINGLE_RANK); `distributed.group.GroupRanks` is for one of several processes.
    """

    rank, size, local_size = 0, 1, 1
    in_step = False
    """Whether all ranks compute each pass together. They then need equal numbers of passes, and cannot repeat one."""

    @property
    def is_main_process(self) -> bool:
        """Whether this process reads text, writes files and logs."""
        return self.rank == 0

    def start(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send the main process's message to the workers, which wait for it in this method; return the message."""
        return dict(message)

    def bind_device(self, device: torch.device) -> torch.device:
        """Return the device that this rank uses, such as one of several GPUs."""
        return device

    def broadcast(self, make: Callable[[], T], *, source: int = 0) -> T:
        """Call `make` in rank `source` only and return its result, which must be a JSON value, in every rank."""
        return make()

    def agree(self, signal: int, seconds: float, *, is_writing: bool = False) -> tuple[int, float, bool]:
        """Wait for all ranks, and exchange values.

        `seconds`: the duration of the training so far. `is_writing`: whether this rank is still writing a checkpoint.

        Returns the number of a signal that any rank received, or 0; the main process's `seconds`; and whether any rank
        is still writing.
        """
        return signal, seconds, is_writing

    def distribute(self, model: nn.Module, device: torch.device, *, parallel: str, precision: str) -> None:
        """Move a model to the device, and prepare its training by all ranks; `parallel`: `training.parallel`."""
        model.to(device)

    def computing(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Context manager for the passes of a micro-batch. `last`: whether it is the last micro-batch of the update."""
        return contextlib.nullcontext()

    def finish_reduction(self, sums: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Sum the gradients and `sums` over all ranks; return the total of each of `sums`, then the gradient norm."""
        return [*sums, gradient_norm(parameters)]

    def whole(self, model: nn.Module) -> contextlib.AbstractContextManager[nn.Module]:
        """Context manager that yields a model that the main process can use without the other ranks."""
        return contextlib.nullcontext(model)

    def report_activity(self, activity: str) -> None:
        """Publish this rank's activity, which other ranks report if they wait for it too long."""

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather tensors of all ranks in the main process: `name` for rank 0, `name.1` for rank 1 and so on."""
        return dict(tensors)

    def check_equal(self, weights: Mapping[str, Tensor]) -> None:
        """Raise `RankExited` if the weights differ between ranks."""


SINGLE_RANK = Ranks()


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the Euclidean norm of all gradients of this rank together; of sharded gradients, of its shards."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not reaches(grads):
        grads = [shard_of(grad) for grad in grads]
        if not reaches(grads):
            return nn.utils.get_total_norm(grads, foreach=True)
    return norm(grads)


def dropout_seed(seed: int, update: int, rank: int) -> int:
    """Return the seed for dropout of one rank in one update, from the run's seed."""
    return int(np.random.SeedSequence((seed, update, rank)).generate_state(1, np.uint64)[0] >> 1)


def name_on_rank(name: str, rank: int) -> str:
    """Return the name under which a rank's tensor is saved: `name` for rank 0, then `name.1`, `name.2` and so on."""
    return f"{name}.{rank}" if rank else name
