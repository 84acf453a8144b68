"""`--processes N`: start N processes that train together on this machine, and monitor them."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transduce.distributed.environment import EXIT_RANK_LOST, this_process
from transduce.errors import SettingsError
from transduce.logging import print_error
from transduce.process import handle_signals, n_cores, send_at_parent_exit

if TYPE_CHECKING:
    from transduce.distributed.group import Learn

GRACE = 10.0  # seconds that the other processes have to exit once one has failed
_POLL = 0.05
_SAVED = (129, 130, 143)  # exit codes after SIGHUP, SIGINT, SIGTERM
_COMMAND = ("-m", "transduce")


def run_worker_if_asked(learn: Learn) -> None:
    """If this process is a worker, train as one and exit."""
    process = this_process()
    if process.rendezvous is not None:
        send_at_parent_exit(signal.SIGTERM)  # save and stop when the launcher dies
    if process.rank > 0:
        from transduce.distributed.group import run_worker

        sys.exit(run_worker(learn))


def launch_if_asked(n: int) -> None:
    """Run this command in `n` processes and exit with their code, unless this is one of them."""
    size = this_process().size
    if size > 1 and n not in (1, size):
        raise SettingsError(f"--processes {n}: torchrun started {size} already; use one of the two")
    if n > size:
        sys.exit(launch(sys.argv[1:], n))


def launch(arguments: Sequence[str], n: int) -> int:
    """Run the command with these arguments in `n` processes; return the exit code.

    They connect over the loopback interface, at ports that the system chooses. Signals are passed on to all. If one
    fails, all exit: the others notice it at once, or are killed after `GRACE` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="transduce-") as folder:
        rendezvous = Path(folder) / "rendezvous"
        processes = [_start(arguments, _environment(os.environ, rank, n, rendezvous)) for rank in range(n)]

        def pass_on(number: signal.Signals) -> None:
            for process in processes:
                process.send_signal(number)  # does nothing once it has exited

        try:
            with handle_signals(pass_on, "SIGINT", "SIGTERM", "SIGHUP"):
                return _watch(processes)
        finally:
            _kill(processes)


def _environment(given: Mapping[str, str], rank: int, n: int, rendezvous: Path) -> dict[str, str]:
    """Environment of one process. The cores are divided unless the user set OMP_NUM_THREADS."""
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n),
        "TRANSDUCE_RENDEZVOUS": str(rendezvous),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    return {"OMP_NUM_THREADS": str(max(1, n_cores() // n)), **given, **own}


def _start(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in a new session, so that Ctrl-C reaches it once, through the launcher."""
    command = [sys.executable, *_COMMAND, *arguments]
    return subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True)


def _watch(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all; return the exit code of rank 0, or of the process whose failure stopped the others."""
    deadline = math.inf
    while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
        if deadline == math.inf and (codes[0] is not None or not {*codes} <= {None, 0, *_SAVED}):
            deadline = time.monotonic() + (GRACE if codes[0] in (None, 0, EXIT_RANK_LOST, *_SAVED) else 0.0)
        time.sleep(_POLL)
    _kill(processes)
    failed = [(rank, code) for rank, code in enumerate(codes) if code not in (None, 0, EXIT_RANK_LOST, *_SAVED)]
    if not failed:
        code = processes[0].returncode
        return code if code in (0, *_SAVED) else 1
    rank, code = failed[0]
    if code is not None and code < 0:
        print_error(
            f"process {rank + 1} of {len(processes)} was killed by {signal.Signals(-code).name}, and the others "
            "stopped; run the same command again to resume from the last checkpoint"
        )
        return 128 - code if rank == 0 else 1
    return code or 1


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill what still runs. Nothing is lost: files are written under another name and renamed."""
    for process in processes:
        process.kill()
        process.wait()
