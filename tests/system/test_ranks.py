"""Several processes train one model, with the samples and losses of one process and exact resumes."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch

from kills import events
from system.commands import small, write_corpus
from system.teams import LEFT, Team
from transduce.runs.folder import RunFolder

pytestmark = pytest.mark.loopback  # starts a server or processes that communicate

EXACT = ("max_updates=40", "average=ema", "optimizer=adam", "schedule=cosine")
PLAIN = (*EXACT, "model.dropout=0.0")
SAME = ("update", "lr", "epoch", "n_targets")


@pytest.fixture(scope="module")
def team(processes: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Team:
    return Team(processes, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone(team: Team) -> Path:
    """One process, without dropout."""
    return team.train("alone", 1, *PLAIN)


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
    team.wait_for_log("cut", members[0], '"update": 30')
    assert members[1].pid is not None
    os.kill(members[1].pid, signal.SIGTERM)  # to one process; all stop after the same update
    team.finish(members, 143, 143)
    assert "SIGTERM: stopped after update" in team.said("cut", 0)
    stopped = {team.said("cut", rank).split("after update ")[1].split(";")[0] for rank in (0, 1)}
    assert len(stopped) == 1
    cut = team.train("cut", 2, *EXACT)
    lines = [
        [
            {key: value for key, value in event.items() if "second" not in key}
            for kind in ("update", "validation")
            for event in events(folder, kind)
        ]
        for folder in (whole, cut)
    ]
    assert lines[0] == lines[1]
    states = [RunFolder.open(folder, model=False).checkpoints.latest() for folder in (whole, cut)]
    a, b = (state.tensors() for state in states if state is not None)
    assert "updater/generator.cpu.1" in a
    assert not torch.equal(a["updater/generator.cpu.1"], a["updater/generator.cpu"])
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("n", [1, 2])
def test_sigterm_interrupts_a_validation_after_everything_was_saved(team: Team, alone: Path, n: int) -> None:
    name, marker = f"stalled{n}", team.path / f"validating{n}"
    members = team.start(name, n, "--stall", str(marker), *PLAIN)
    while members[0].is_alive() and not marker.exists():
        time.sleep(0.01)
    for member in members:  # as the launcher passes it on
        assert member.pid is not None
        os.kill(member.pid, signal.SIGTERM)
    for member in members:
        member.join(timeout=20)
    codes = [member.exitcode for member in members]
    assert codes[0] == 143 and {*codes} <= {143, LEFT}, "at once, not after the validation"
    checkpoint = RunFolder.open(team.path / name, model=False).checkpoints.latest()
    assert checkpoint is not None and checkpoint.update == 20 and checkpoint.state["training"]["validated"] < 20
    assert_same_but_for_rounding(alone, team.train(name, n, *PLAIN))


def test_a_stuck_process_is_named_with_its_activity(team: Team) -> None:
    members = team.start("stuck", 2, "timeout=0.05", "max_updates=100000", *PLAIN[1:])
    team.wait_for_log("stuck", members[0], '"update": 20')
    assert members[1].pid is not None
    os.kill(members[1].pid, signal.SIGSTOP)
    members[0].join(timeout=60)
    members[1].kill()
    members[1].join()
    assert members[0].exitcode == LEFT
    assert "no answer for 0.05 minutes (training.timeout) from process 2 of 2 (" in team.said("stuck")


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
