"""What the processes of a training do beside the first: they learn with it, and neither read text, write nor speak."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from transduce.errors import Interrupted, Lost, TooLong, TrainingError, TransduceError
from transduce.log import Log
from transduce.place import LOST, this_place
from transduce.run import learn
from transduce.tasks.table import find_task
from transduce.training.distributed import FollowedFolder, joined
from transduce.training.link import ALONE
from transduce.training.step import hold_few_kernels


def follow() -> int:
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
            task, log = find_task(folder.settings.task), Log(quiet=True, stream=io.StringIO())
            prepared = task.find_prepared(folder, log)
            learn(task, folder, prepared, device=message["device"], log=log, link=link)
            return 0
    except Lost:
        return LOST
    except TransduceError as error:
        if isinstance(error, Interrupted | TrainingError) and not isinstance(error, TooLong):
            return error.exit_code
        place = this_place()
        print(f"transduce: error: process {place.rank + 1} of {place.size}: {error}", file=sys.stderr)
        return error.exit_code
