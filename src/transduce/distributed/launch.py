"""Read the rank of this process from torchrun's environment variables, and start processes for `--processes N`.

PyTorch's library behind torchrun starts and monitors the N processes that train together on this machine.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transduce.errors import RankExited, SettingsError
from transduce.logging import print_error
from transduce.process import SAFE_PATH, n_cores, send_at_parent_exit

_SAVED = (129, 130, 143)  # exit codes after SIGHUP, SIGINT, SIGTERM
_CONSEQUENCES = (RankExited.exit_code, -signal.SIGTERM, *_SAVED)
"""Exit codes of a process that stopped because another process did: torchrun sends SIGTERM to all others."""


LAUNCHER_ID = "transduce-processes"
"""The job name by which processes know that `--processes` started them."""


@dataclass(frozen=True, slots=True)
class ProcessRank:
    """Rank of a process among all processes of a training, and its rank among the processes on its machine, from 0.

    `launched`: whether `--processes` started the process, and will report failures.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launched: bool = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ProcessRank:
        """Read the rank from environment variables; if one is missing, the process trains alone.

        Clusters set some of the variables for all jobs. Raises `SettingsError` if all are set but invalid.

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
    return ProcessRank.of(os.environ)


def stop_with_launcher() -> None:
    """Make this process save and stop when the launcher dies, if `--processes` started it."""
    if this_process().launched:
        send_at_parent_exit(signal.SIGTERM)


def launch_if_asked(n: int, *, max_restarts: int) -> None:
    """Run this command in `n` processes and exit with their exit code, unless this process is one of them already."""
    size = this_process().size
    if size > 1 and n not in (1, size):
        raise SettingsError(f"--processes {n}: torchrun started {size} already; use one of the two")
    if max_restarts and n == 1:
        raise SettingsError(f"--max-restarts {max_restarts}: needs --processes of at least 2; torchrun has its own")
    if n > size:
        sys.exit(launch(["-m", "transduce", *sys.argv[1:]], n, max_restarts=max_restarts))


def launch(arguments: Sequence[str], n: int, *, max_restarts: int = 0) -> int:
    """Run Python with these arguments in `n` processes; return the exit code.

    Signals are passed on to all processes. If one fails, all exit: the others notice it at once, or are killed after
    torchrun's 30 seconds. If a process was lost, all start again, at most `max_restarts` times.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, n_cores() // n)))
    os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback, **SAFE_PATH}
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(_signals_to_forward())
    logging.disable()  # we report failures in one line
    while True:
        try:
            codes = _run_once(arguments, n)
        except SignalException as error:
            return 128 + error.sigval
        if not codes:
            return 0
        if not _is_loss(codes) or not max_restarts:
            return report_failures(codes, n)
        max_restarts -= 1
        lost = _killed(codes, n) or "a process was lost"
        print_error(f"{lost}; all start again from the last checkpoint (restarts left: {max_restarts})")


def _run_once(arguments: Sequence[str], n: int) -> dict[int, int]:
    """Run the processes once; return the exit codes of failed processes by rank.

    The agent is used directly because `elastic_launch` leaves a thread in the rendezvous store after a signal, which
    may abort the process while it exits.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    meeting = RendezvousParameters(
        "c10d", endpoint="localhost:0", run_id=LAUNCHER_ID, min_nodes=1, max_nodes=1, local_addr="localhost"
    )
    rendezvous = get_rendezvous_handler(meeting)
    spec = WorkerSpec(
        role="rank",
        local_world_size=n,
        entrypoint=sys.executable,
        args=tuple(arguments),
        rdzv_handler=rendezvous,
        max_restarts=0,  # a restart would repeat a user's mistake
        local_addr="localhost",
    )
    try:
        result = LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs(log_dir=os.devnull)).run()
        return {rank: failure.exitcode for rank, failure in result.failures.items()}
    finally:
        rendezvous.shutdown()


def _signals_to_forward() -> list[str]:
    """Return the names of the signals to pass on. Signals that are ignored (nohup, background jobs) stay ignored."""
    names = (name for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
    return [name for name in names if signal.getsignal(signal.Signals[name]) is not signal.SIG_IGN]


def _is_loss(codes: Mapping[int, int]) -> bool:
    """Whether a process was lost: it was killed or did not answer, and was not stopped by an error or by the user.

    `codes`: exit codes of failed processes by rank.
    """
    causes = [code for code in codes.values() if code not in _CONSEQUENCES]
    return all(code < 0 for code in causes) if causes else not {*codes.values()} & {*_SAVED}


def report_failures(codes: Mapping[int, int], n: int) -> int:
    """Return the exit code of the process whose failure stopped the others; print its number if it was killed.

    `codes`: exit codes of failed processes by rank, negative ones for signals.
    """
    causes = [code for _, code in sorted(codes.items()) if code not in _CONSEQUENCES]
    if not causes:
        return next((code for code in codes.values() if code in _SAVED), 1)
    if causes[0] > 0:
        return causes[0]
    print_error(
        f"{_killed(codes, n)}, and the others stopped; run the same command again to resume from the last checkpoint"
    )
    return 128 - causes[0]


def _killed(codes: Mapping[int, int], n: int) -> str:
    """Describe the first of n processes that was killed; return an empty string if none was."""
    for rank, code in sorted(codes.items()):
        if code < 0 and code not in _CONSEQUENCES:
            return f"process {rank + 1} of {n} was killed by {signal.Signals(-code).name}"
    return ""
