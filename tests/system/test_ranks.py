"""Several processes train one model, with the samples and losses of one process and exact resumes."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from system.commands import small, write_corpus
from transduce.runs.folder import RunFolder

pytestmark = pytest.mark.loopback  # starts a server or processes that communicate

EXACT = ("max_updates=40", "average=ema", "optimizer=adam", "schedule=cosine")
PLAIN = (*EXACT, "model.dropout=0.0")
SAME = ("update", "lr", "epoch", "n_targets")
LEFT = 1  # exit code of a process that lost another one


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


class Team:
    """Trainings with one or more processes, with their folders in one place."""

    def __init__(self, context: ForkServerContext, path: Path) -> None:
        self.context, self.path, self.port = context, path, 0

    def start(self, name: str, n: int, *arguments: str, kill: tuple[int, str] | None = None) -> list[ForkServerProcess]:
        """`kill`: the rank that kills itself, and when."""
        self.port = free_port()
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
        return {"RANK": str(rank), "WORLD_SIZE": str(n), "GLOO_SOCKET_IFNAME": "lo", **address}

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
        assert [member.exitcode for member in members] == list(codes), errors

    def train(self, name: str, n: int, *arguments: str, kill: tuple[int, str] | None = None) -> Path:
        codes = [0 if kill is None else -signal.SIGKILL if rank == kill[0] else LEFT for rank in range(n)]
        self.finish(self.start(name, n, *arguments, kill=kill), *codes)
        return self.path / name

    def samples(self, name: str, rank: int = 0) -> dict[tuple[int, ...], tuple[int, ...]]:
        """The sentences of each update, by epoch and index."""
        lines = (self.path / f"{name}.{rank}.samples").read_text().splitlines()
        numbers = [tuple(map(int, line.split())) for line in lines]
        return {line[:2]: line[2:] for line in numbers}

    def said(self, name: str, rank: int = 0) -> str:
        return (self.path / f"{name}.{rank}.err").read_text()


@pytest.fixture(scope="module")
def team(processes: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Team:
    return Team(processes, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone(team: Team) -> Path:
    """One process, without dropout."""
    return team.train("alone", 1, *PLAIN)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [event for event in found if event["event"] == kind]


def assert_same_but_for_rounding(one: Path, other: Path) -> None:
    """Compare losses of updates and validations, and what depends on the samples only."""
    for kind in ("update", "validation"):
        a, b = events(one, kind), events(other, kind)
        assert [[e[k] for k in SAME if k in e] for e in a] == [[e[k] for k in SAME if k in e] for e in b]
        for name in ("loss", "nll"):
            assert [e[name] for e in a] == pytest.approx([e[name] for e in b], rel=2e-5)
    a, b = (RunFolder.open(folder, model=False).load_model() for folder in (one, other))
    # key biases have gradients of rounding errors only, which Adam turns into steps of any direction
    assert [name for name in a if a[name].ndim > 1 and not torch.allclose(a[name], b[name], atol=1e-3)] == []


def test_two_processes_give_the_samples_and_losses_of_one(team: Team, alone: Path) -> None:
    two = team.train("two", 2, *PLAIN)
    assert team.samples("alone") == team.samples("two", 0) == team.samples("two", 1)
    assert_same_but_for_rounding(alone, two)
    assert [event["processes"] for folder in (alone, two) for event in events(folder, "start")] == [1, 2]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_resuming_with_another_number_of_processes_gives_the_same_run(
    team: Team, alone: Path, before: int, after: int
) -> None:
    name = f"from{before}to{after}"
    team.train(name, before, *PLAIN, kill=(0, "update:34"))
    there = max(team.samples(name))
    folder = team.train(name, after, *PLAIN)
    assert max(team.samples(name)) > there
    assert f"had {before} processes until update 20 and resumes with {after}" in team.said(name)
    assert team.samples(name) == team.samples("alone")
    assert_same_but_for_rounding(alone, folder)


def test_two_processes_resume_bit_identically_after_kills_and_signals(team: Team) -> None:
    """With dropout; compares log, model and last checkpoint, with the generators of all ranks."""
    whole = team.train("whole", 2, *EXACT)
    team.train("cut", 2, *EXACT, kill=(0, "update:13"))  # before the first checkpoint
    assert "another process of this training exited" in team.said("cut", 1)
    team.train("cut", 2, *EXACT, kill=(1, "update:27"))  # the worker
    assert "another process of this training exited" in team.said("cut", 0)
    members = team.start("cut", 2, *EXACT)
    while members[0].is_alive() and '"update": 30' not in (team.path / "cut" / "metrics.jsonl").read_text():
        time.sleep(0.001)
    assert members[1].pid is not None
    os.kill(members[1].pid, signal.SIGTERM)  # to one process; all stop after the same update
    team.finish(members, 143, 143)
    assert "SIGTERM: stopped after update" in team.said("cut", 0)
    stopped = {team.said("cut", rank).split("after update ")[1].split(";")[0] for rank in (0, 1)}
    assert len(stopped) == 1
    cut = team.train("cut", 2, *EXACT)
    lines = [
        [
            {k: v for k, v in event.items() if "seconds" not in k}
            for kind in ("update", "validation")
            for event in events(f, kind)
        ]
        for f in (whole, cut)
    ]
    assert [{k: v for k, v in e.items() if k != "tokens_per_second"} for e in lines[0]] == [
        {k: v for k, v in e.items() if k != "tokens_per_second"} for e in lines[1]
    ]
    states = [RunFolder.open(folder, model=False).checkpoints.latest() for folder in (whole, cut)]
    a, b = (state.tensors() for state in states if state is not None)
    assert "updater/generator.cpu.1" in a
    assert not torch.equal(a["updater/generator.cpu.1"], a["updater/generator.cpu"])
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_sigterm_interrupts_the_validation_of_two_processes_after_everything_was_saved(team: Team, alone: Path) -> None:
    marker = team.path / "validating"
    members = team.start("stalled", 2, "--stall", str(marker), *PLAIN)
    while members[0].is_alive() and not marker.exists():
        time.sleep(0.01)
    for member in members:  # as the launcher passes it on
        assert member.pid is not None
        os.kill(member.pid, signal.SIGTERM)
    for member in members:
        member.join(timeout=20)
    assert members[0].exitcode == 143 and members[1].exitcode in (143, LEFT), "at once, not after the validation"
    checkpoint = RunFolder.open(team.path / "stalled", model=False).checkpoints.latest()
    assert checkpoint is not None and checkpoint.update == 20 and checkpoint.state["training"]["validated"] < 20
    assert_same_but_for_rounding(alone, team.train("stalled", 2, *PLAIN))


def test_two_processes_skip_an_update_whose_loss_is_not_finite_in_one_of_them(team: Team) -> None:
    asked = ("--poison", "7", *PLAIN[1:], "max_updates=10")
    one, two = team.train("skip1", 1, *asked), team.train("skip2", 2, *asked)
    assert [event["update"] for event in events(two, "skipped")] == [7]
    assert_same_but_for_rounding(one, two)


def test_a_user_mistake_is_reported_once_and_stops_all_processes(team: Team) -> None:
    """The main process finds it while the worker waits. A finished run is reported the same way."""
    src, tgt = write_corpus(team.path, "train", 60)
    asked = ["train", "--src", src, "--tgt", tgt, *small("training.max_updates=2"), "--run", team.path / "run"]
    right = tgt.read_text()
    tgt.write_text("Eins.\n", encoding="utf-8")
    team.finish(team.command("mistake", 2, *asked), 2, 2)
    assert team.said("mistake", 0).count("transduce: error:") == 1 and "train.de" in team.said("mistake", 0)
    assert "transduce" not in team.said("mistake", 1)  # PyTorch may warn of a host without a name
    assert not (team.path / "run").exists()
    tgt.write_text(right, encoding="utf-8")
    team.finish(team.command("right", 2, *asked), 0, 0)
    assert "transduce" not in team.said("right", 1)
    assert events(team.path / "run", "end")[0]["update"] == 2
    team.finish(team.command("again", 2, *asked), 0, 0)
    assert "is finished" in team.said("again", 0)
