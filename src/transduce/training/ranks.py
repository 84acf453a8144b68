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
    """All ranks of a training, seen from `rank`, one of `size`, of which `local_size` are on this machine.

    The methods here are for a process that trains alone (SINGLE_RANK). `distributed.group.GroupRanks` is one of
    several processes.
    """

    rank, size, local_size = 0, 1, 1
    in_step = False
    """Whether all ranks compute each pass together. Then all need equally many passes, and none can be repeated."""

    @property
    def is_main_process(self) -> bool:
        """Whether this process reads text, writes files and logs."""
        return self.rank == 0

    def start(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send the main process's message to the workers, which wait for it here; return it."""
        return dict(message)

    def bind_device(self, device: torch.device) -> torch.device:
        """Return the device that this rank uses, such as one of several GPUs."""
        return device

    def broadcast(self, make: Callable[[], T], *, source: int = 0) -> T:
        """Call `make` in rank `source` only and return its result, which must be JSON-able, in every rank."""
        return make()

    def agree(self, signal: int, seconds: float, *, is_writing: bool = False) -> tuple[int, float, bool]:
        """Wait for all ranks. Returns the signal that any of them received, or 0, and the main process's seconds.

        The third value tells whether any rank is still writing.
        """
        return signal, seconds, is_writing

    def distribute(self, model: nn.Module, device: torch.device, *, parallel: str, precision: str) -> None:
        """Move this model to the device and prepare its training by all ranks, as `training.parallel` says."""
        model.to(device)

    def computing(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Context of a micro-batch's passes; the `last` backward pass of an update starts the gradient reduction."""
        return contextlib.nullcontext()

    def finish_reduction(self, sums: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Wait until gradients and `sums` are summed over all ranks; return these sums and then the gradient norm."""
        return [*sums, gradient_norm(parameters)]

    def whole(self, model: nn.Module) -> contextlib.AbstractContextManager[nn.Module]:
        """Context in which the main process can use this model alone."""
        return contextlib.nullcontext(model)

    def report_activity(self, activity: str) -> None:
        """Note this rank's activity, for the message of ranks that wait for it too long."""

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather tensors of all ranks in the main process: `name` for rank 0, `name.1` for rank 1 and so on."""
        return dict(tensors)

    def check_equal(self, weights: Mapping[str, Tensor]) -> None:
        """Raise `RankExited` unless all ranks have the same weights."""


SINGLE_RANK = Ranks()


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of this rank's gradients."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not reaches(grads):
        grads = [shard_of(grad) for grad in grads]
        if not reaches(grads):
            return nn.utils.get_total_norm(grads, foreach=True)
    return norm(grads)


def dropout_seed(seed: int, update: int, rank: int) -> int:
    """Seed of one rank's dropout in an update."""
    return int(np.random.SeedSequence((seed, update, rank)).generate_state(1, np.uint64)[0] >> 1)


def name_on_rank(name: str, rank: int) -> str:
    """Name of a tensor that every rank has: `name` for rank 0, then `name.1`, `name.2` and so on."""
    return f"{name}.{rank}" if rank else name
