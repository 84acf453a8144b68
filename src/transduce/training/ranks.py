"""What one of the processes that train a model sees of the others: the loop asks its `Ranks`.

For a process on its own it is `SingleRank`, whose answers cost nothing; `distributed.py` has that of one of several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from transduce.training.schedule import Clock
from transduce.training.stopping import StopRequest

T = TypeVar("T")


class Ranks(ABC):
    """What one of the processes sees of the others. `rank` of `size`; the first, 0, leads."""

    rank: int
    size: int
    local_size: int
    """How many of the processes share this machine."""

    @property
    def is_main_process(self) -> bool:
        """Whether this process reads, writes and speaks for all."""
        return self.rank == 0

    @abstractmethod
    def start(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Let those begin that wait here for the first process, whose message comes back in all."""

    @abstractmethod
    def bind_device(self, device: torch.device) -> torch.device:
        """Say where the gradients will lie, on a device of this kind; the very device that is this process's."""

    @abstractmethod
    def broadcast(self, make: Callable[[], T]) -> T:
        """What the first process makes, JSON-able, in all of them. Only there `make` is called."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all, and exchange a word."""

    @abstractmethod
    def all_reduce(self, parameters: Sequence[torch.nn.Parameter], sums: Sequence[Tensor]) -> list[Tensor]:
        """Add up the gradients of all processes, in process, and such sums as are given; exchange a word."""

    @abstractmethod
    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Byte tensors of all, in the first: `name` of the first, `name.1` of the second and so on."""

    @abstractmethod
    def check_equal(self, weights: Mapping[str, Tensor]) -> None:
        """See that all have the very same weights."""

    @abstractmethod
    def clock(self, used: float) -> Clock:
        """A clock that shows the same in all processes."""

    @abstractmethod
    def share_stop_request(self, request: StopRequest) -> StopRequest:
        """A request that is there as soon as all know of one that any of them has."""

    @abstractmethod
    def seed_dropout(self, seed: int) -> None:
        """Give a fresh run's dropout its random numbers."""


class SingleRank(Ranks):
    """One process: nobody to ask, nothing to wait for."""

    rank, size, local_size = 0, 1, 1

    def start(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Nobody waits."""
        return dict(message)

    def bind_device(self, device: torch.device) -> torch.device:
        """It has the device for itself."""
        return device

    def broadcast(self, make: Callable[[], T]) -> T:
        """What is made."""
        return make()

    def barrier(self) -> None:
        """Nothing to do."""

    def all_reduce(self, parameters: Sequence[torch.nn.Parameter], sums: Sequence[Tensor]) -> list[Tensor]:
        """They are the sums already."""
        return list(sums)

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """They are all there is."""
        return dict(tensors)

    def check_equal(self, weights: Mapping[str, Tensor]) -> None:
        """Nothing to compare."""

    def clock(self, used: float) -> Clock:
        """An ordinary one."""
        return Clock(used)

    def share_stop_request(self, request: StopRequest) -> StopRequest:
        """The request itself."""
        return request

    def seed_dropout(self, seed: int) -> None:
        """It goes on from where making the weights left it."""


SINGLE_RANK = SingleRank()


def dropout_seed(seed: int, update: int, rank: int) -> int:
    """The seed of one process's random numbers from an update on."""
    return int(np.random.SeedSequence((seed, update, rank)).generate_state(1, np.uint64)[0] >> 1)


def name_on_rank(name: str, rank: int) -> str:
    """Of a tensor that every process has one of: as it stands for the first, then name.1, name.2 and so on."""
    return f"{name}.{rank}" if rank else name
