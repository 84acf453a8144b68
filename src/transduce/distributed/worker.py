"""Worker ranks: they train, but read no text, write no files and do not log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transduce.distributed.environment import EXIT_RANK_LOST, this_process
from transduce.distributed.group import join_ranks
from transduce.errors import Interrupted, RankExited, TooLong, TrainingError, TransduceError
from transduce.logging import print_error
from transduce.process import limit_kernel_cache
from transduce.runs.folder import RunFolder
from transduce.training.ranks import SINGLE_RANK, Ranks

Learn = Callable[[RunFolder, Ranks, str], None]
"""Trains the model of a run folder with the other ranks, on the named device."""


def run_worker(learn: Learn) -> int:
    """Wait for the main process and train with it; return the exit code.

    Errors that all ranks see are reported by the main process, others here, with the number of this process.
    """
    limit_kernel_cache()
    try:
        with join_ranks() as ranks:
            assert ranks is not SINGLE_RANK, "a worker has a main process"
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
