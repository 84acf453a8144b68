"""`--processes N`: start N processes that train together on this machine, and monitor them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from transduce.distributed.environment import EXIT_RANK_LOST, this_process
from transduce.errors import SettingsError
from transduce.process import send_at_parent_exit

if TYPE_CHECKING:
    from transduce.distributed.worker import Learn

GRACE = 10.0  # seconds that the other processes have to exit once one has failed
_POLL = 0.05
_SAVED = (129, 130, 143)  # exit codes after SIGHUP, SIGINT, SIGTERM
_COMMAND = ("-m", "transduce")


def run_worker_if_asked(learn: Learn) -> None:
    """If this process is a worker, train as one and exit."""
    process = this_process()
    if process.rendezvous is not None:
        stop_with_launcher()
    if process.is_worker:
        from transduce.distributed.worker import run_worker

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
        try:
            with _passed_on(processes):
                return _watch(processes)
        finally:
            _end(processes)


def stop_with_launcher() -> None:
    """Save and stop when the launcher dies (Linux only)."""
    send_at_parent_exit(signal.SIGTERM)


def _environment(given: Mapping[str, str], rank: int, n: int, rendezvous: Path) -> dict[str, str]:
    """Environment of one process. The cores are divided unless the user set OMP_NUM_THREADS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n),
        "TRANSDUCE_RENDEZVOUS": str(rendezvous),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    return {"OMP_NUM_THREADS": str(max(1, cores // n)), **given, **own}


def _start(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in a new session, so that Ctrl-C reaches it once, through the launcher."""
    command = [sys.executable, *_COMMAND, *arguments]
    return subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True)


def _watch(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all; return the exit code of rank 0, or of the process whose failure stopped the others."""
    first, deadline = processes[0], None
    while any(process.poll() is None for process in processes):
        codes = [process.poll() for process in processes]
        if deadline is None and (codes[0] is not None or any(code not in (None, 0, *_SAVED) for code in codes)):
            deadline = time.monotonic() + (GRACE if codes[0] in (None, 0, EXIT_RANK_LOST, *_SAVED) else 0.0)
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(_POLL)
    codes = [process.poll() for process in processes]
    _end(processes)
    failed = [(rank, code) for rank, code in enumerate(codes) if code not in (None, 0, EXIT_RANK_LOST, *_SAVED)]
    if not failed:
        return first.returncode if first.returncode in (0, *_SAVED) else 1
    rank, code = failed[0]
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        print(
            f"transduce: error: process {rank + 1} of {len(processes)} was killed by {name}, and the others stopped; "
            "run the same command again to resume from the last checkpoint",
            file=sys.stderr,
        )
        return 128 - code if rank == 0 else 1
    return code or 1


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill what still runs. Nothing is lost: files are written under another name and renamed."""
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


@contextlib.contextmanager
def _passed_on(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Inside, SIGINT, SIGTERM and SIGHUP are passed on to all processes."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [number for name in names if signal.getsignal(number := signal.Signals[name]) is not signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
