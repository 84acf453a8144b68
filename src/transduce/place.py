"""Which of several training processes this one is: what torchrun or `--processes` tells it by environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LOST = 76
"""With this exit code a process that `--processes` has begun says that it ended because another one did."""


@dataclass(frozen=True, slots=True)
class Place:
    """The number of a process among `size` that train together, from 0; `local` ones are those of its machine.

    `meeting`: the file where processes of one machine find each other; None where torchrun sees to that.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    meeting: Path | None = None

    @property
    def follows(self) -> bool:
        """Whether another process reads, writes and speaks for this one."""
        return self.rank > 0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """As the environment says.

        >>> Place.of({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}).follows
        True
        >>> Place.of({}) == Place()
        True
        """
        meeting = environment.get("TRANSDUCE_MEETING")
        if int(environment.get("WORLD_SIZE", 1)) < 2 or (meeting is None and "MASTER_ADDR" not in environment):
            return cls()
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank = int(environment.get("LOCAL_RANK", rank))
        local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
        return cls(rank, size, local_rank, local_size, None if meeting is None else Path(meeting))


def this_place() -> Place:
    """Of this process."""
    return Place.of(os.environ)
