"""The rank of this process, from the environment variables that torchrun or `--processes` sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transduce.errors import SettingsError

EXIT_RANK_LOST = 76
"""Exit code of a process started by `--processes` that exited because another one did."""


@dataclass(frozen=True, slots=True)
class ProcessRank:
    """Rank of a process among `size` that train together, from 0, and on its machine.

    `rendezvous` is the file through which processes of one machine connect; None if torchrun connects them.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    rendezvous: Path | None = None

    @property
    def is_worker(self) -> bool:
        """Whether another process is the main process."""
        return self.rank > 0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ProcessRank:
        """Read the environment. If a variable is missing (clusters set some for all jobs), the process trains alone.

        Raises `SettingsError` if all are set but invalid.

        >>> torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        >>> ProcessRank.of(torchrun).is_worker
        True
        >>> ProcessRank.of({"WORLD_SIZE": "2", "MASTER_ADDR": "node1"}) == ProcessRank.of({}) == ProcessRank()
        True
        """
        rendezvous = environment.get("TRANSDUCE_RENDEZVOUS")
        met = ("TRANSDUCE_RENDEZVOUS",) if rendezvous is not None else ("MASTER_ADDR", "MASTER_PORT")
        if not all(name in environment for name in ("RANK", "WORLD_SIZE", *met)):
            return cls()
        rank, size = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
        if size < 2:
            return cls()
        local_rank, local_size = (
            _number(environment, name) if name in environment else usual
            for name, usual in (("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", size))
        )
        if not (rank < size and local_rank < local_size):
            raise SettingsError(
                f"the environment has RANK={rank} of WORLD_SIZE={size}, LOCAL_RANK={local_rank} of "
                f"LOCAL_WORLD_SIZE={local_size}: numbers go from 0 to one below; unset RANK to train alone"
            )
        return cls(rank, size, local_rank, local_size, None if rendezvous is None else Path(rendezvous))


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment[name]
    if not (value.isascii() and value.isdecimal()):
        raise SettingsError(
            f"the environment has {name}={value!r}: RANK and WORLD_SIZE are numbers, as torchrun sets them; "
            "unset RANK to train alone"
        )
    return int(value)


def this_process() -> ProcessRank:
    """The rank of this process."""
    return ProcessRank.of(os.environ)
