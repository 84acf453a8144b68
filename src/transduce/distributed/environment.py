"""The rank of this process, from the environment variables that torchrun sets, also for `--processes`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from transduce.errors import SettingsError

LAUNCHER_ID = "transduce-processes"
"""torchrun's name of a job that `--processes` started."""


@dataclass(frozen=True, slots=True)
class ProcessRank:
    """Rank of a process among the `size` that train one model, from 0, and among those of its machine.

    `launched`: by `--processes`, which reports the process that failed.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launched: bool = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ProcessRank:
        """Read the environment. If a variable is missing (clusters set some for all jobs), the process trains alone.

        Raises `SettingsError` if all are set but invalid.

        >>> torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        >>> ProcessRank.of(torchrun).rank
        1
        >>> ProcessRank.of({"WORLD_SIZE": "2", "MASTER_ADDR": "node1"}) == ProcessRank.of({}) == ProcessRank()
        True
        """
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
            return cls()
        whole = [environment["RANK"], environment["WORLD_SIZE"]]
        local = [environment.get("LOCAL_RANK", whole[0]), environment.get("LOCAL_WORLD_SIZE", whole[1])]
        try:
            rank, size, local_rank, local_size = map(int, whole + local)
            valid = 0 <= rank < size and 0 <= local_rank < local_size
        except ValueError:
            valid = False
        if not valid:
            raise SettingsError(
                f"the environment has RANK={whole[0]} of WORLD_SIZE={whole[1]}, LOCAL_RANK={local[0]} of "
                f"LOCAL_WORLD_SIZE={local[1]}: ranks start at 0 and are below the size; unset RANK to train alone"
            )
        if size < 2:
            return cls()
        return cls(rank, size, local_rank, local_size, environment.get("TORCHELASTIC_RUN_ID") == LAUNCHER_ID)


def this_process() -> ProcessRank:
    """The rank of this process."""
    return ProcessRank.of(os.environ)
