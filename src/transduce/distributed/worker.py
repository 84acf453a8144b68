"""What the processes of a training do beside the first: they learn with it, and neither read text, write nor speak."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transduce.distributed.environment import LOST, this_place
from transduce.distributed.group import FollowedFolder, joined
from transduce.errors import Interrupted, RankExited, TooLong, TrainingError, TransduceError
from transduce.logging import print_error
from transduce.runs.folder import RunFolder
from transduce.training.ranks import ALONE, Link
from transduce.training.step import hold_few_kernels

Learn = Callable[[RunFolder, Link, str], None]
"""Trains the model of a run folder with the other processes, on a device of this name."""


def follow(learn: Learn) -> int:
    """Train with the first process of torchrun, or of `--processes`, as soon as it begins; the exit code.

    What ends all processes alike the first one tells. Other errors have this one's number before them.
    """
    hold_few_kernels()
    try:
        with joined() as link:
            assert link is not ALONE, "nobody to follow"
            message = link.begin({})
            if "exit" in message:
                return int(message["exit"])
            folder = FollowedFolder.open(Path(message["folder"]), model=False)
            learn(folder, link, message["device"])
            return 0
    except RankExited:
        return LOST
    except TransduceError as error:
        if isinstance(error, Interrupted | TrainingError) and not isinstance(error, TooLong):
            return error.exit_code
        place = this_place()
        print_error(f"process {place.rank + 1} of {place.size}: {error}")
        return error.exit_code
