"""Trainings in processes that tests kill."""

import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import kills
import toys
from system.commands import assert_same_weights, succeed, transduce
from transduce import Translator
from transduce.errors import RankExited, TrainingError

LEFT = RankExited.exit_code  # exit code of a process that lost another one


def assert_resumes_exactly(
    processes: ForkServerContext, folder: Path, command: Sequence[object], *killed_at: tuple[str, int]
) -> None:
    """Check that a training that is killed at these calls (see `toys.KILLS`) is repeated bit for bit by its command."""
    whole, cut, errors = folder / "whole", folder / "cut", folder / "errors"
    starts = [(whole, None), *((cut, call) for call in killed_at), (cut, None)]
    for run, call in starts:
        target = toys.killed_command if call else toys.command
        arguments = [*map(str, command), "--run", str(run)]
        process = processes.Process(target=target, args=(arguments, errors, *(call or ({},))))
        process.start()
        process.join(120)
        assert process.exitcode == (-signal.SIGKILL if call else 0), errors.read_text()
    assert len(kills.events(cut, "restart")) == len(killed_at)
    assert kills.computed(whole) == kills.computed(cut)
    *_, last = sorted((whole / "checkpoints").iterdir())
    for name in ("config.json", "model.safetensors", f"checkpoints/{last.name}/training.safetensors"):
        assert (whole / name).read_bytes() == (cut / name).read_bytes(), name


def assert_resumes_without_start(folder: Path, command: Callable[[str], list[object]], number: int) -> Path:
    """Check that a fine-tuning of `start` that fails at an update resumes exactly after `start` was moved away.

    At the first update: as if it had been killed before the first checkpoint. Returns the run.
    """
    whole, run = folder / "whole", folder / f"parts{number}"
    if not whole.exists():
        succeed(*command(whole.name))
    with toys.failing_update(number, TrainingError("interrupted by the test")):
        assert transduce(*command(run.name)).code == 1
    if number == 1:
        shutil.rmtree(run / "checkpoints")
    (folder / "start").rename(folder / "aside")
    try:
        assert number == 1 or len(Translator.load(run).translate(["a dog"])) == 1  # from the copy of the weights
        succeed(*command(run.name))
    finally:
        (folder / "aside").rename(folder / "start")
    assert_same_weights(whole, run)
    return run


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


class Team:
    """Trainings with one or more processes, with their folders in one place."""

    def __init__(self, context: ForkServerContext, path: Path, *, n_machines: int = 1) -> None:
        self.context, self.path, self.n_machines, self.port = context, path, n_machines, 0

    def start(self, name: str, n: int, *arguments: str, kill: tuple[int, str] | None = None) -> list[ForkServerProcess]:
        """`kill`: the rank that kills itself, and when."""
        self.port = free_port() if n > 1 else 0
        members = []
        for rank in range(n):
            process = self.process(rank, n)
            rest = ["--kill", kill[1], *arguments] if kill is not None and kill[0] == rank else list(arguments)
            files = ([str(self.path / name), *rest], self.path / f"{name}.{rank}.err", process)
            members.append(self.context.Process(target=toys.process, args=files))
        for member in members:
            member.start()
        return members

    def process(self, rank: int, n: int) -> dict[str, str]:
        """The environment of one of the processes started next."""
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(self.port)}
        local = n // self.n_machines
        places = {"RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
        return {"GLOO_SOCKET_IFNAME": "lo", **address, **{name: str(place) for name, place in places.items()}}

    def command(self, name: str, n: int, *arguments: object) -> list[ForkServerProcess]:
        """Start processes that run a command."""
        self.port = free_port()
        given = [str(argument) for argument in arguments]
        members = []
        for rank in range(n):
            files = (given, self.path / f"{name}.{rank}.err", self.process(rank, n))
            members.append(self.context.Process(target=toys.command, args=files))
            members[-1].start()
        return members

    def finish(self, members: Sequence[ForkServerProcess], *codes: int) -> None:
        for member in members:
            member.join(timeout=120)
        errors = "".join(path.read_text() for path in sorted(self.path.glob("*.err")))
        found = [member.exitcode for member in members]
        assert found == list(codes), f"exit codes {found}, not {list(codes)}\n{errors}"

    def train(self, name: str, n: int, *arguments: str, kill: tuple[int, str] | None = None) -> Path:
        codes = [0 if kill is None else -signal.SIGKILL if rank == kill[0] else LEFT for rank in range(n)]
        self.finish(self.start(name, n, *arguments, kill=kill), *codes)
        return self.path / name

    def samples(self, name: str, rank: int = 0) -> dict[tuple[int, ...], tuple[int, ...]]:
        """The sentences of each update, by epoch and index."""
        lines = (self.path / f"{name}.{rank}.samples").read_text().splitlines()
        numbers = [tuple(map(int, line.split())) for line in lines]
        return {line[:2]: line[2:] for line in numbers}

    def wait_for_log(self, name: str, member: ForkServerProcess, text: str) -> None:
        """Wait until the log of a training contains this."""
        log = self.path / name / "metrics.jsonl"
        while member.is_alive() and not (log.exists() and text in log.read_text()):
            time.sleep(0.001)

    def said(self, name: str, rank: int = 0) -> str:
        return (self.path / f"{name}.{rank}.err").read_text()
