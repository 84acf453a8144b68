"""Several processes train one model, with the samples and losses of one process and exact resumes."""

import contextlib
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
both = pytest.mark.parametrize("parallel", ["replicate", "shard"])


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
    # key biases and a few other weights have gradients of rounding errors only: Adam's steps have any direction
    assert [name for name in a if a[name].ndim > 1 and (a[name] - b[name]).norm() > 3e-3 * a[name].norm()] == []


@both
def test_two_processes_give_the_samples_and_losses_of_one(team: Team, alone: Path, parallel: str) -> None:
    """More of them: the resumes below."""
    two = team.train(parallel, 2, f"parallel={parallel}", *PLAIN)
    assert all(team.samples(parallel, rank) == team.samples("alone") for rank in range(2))
    assert_same_but_for_rounding(alone, two)
    assert [event["processes"] for folder in (alone, two) for event in events(folder, "start")] == [1, 2]


def test_shards_on_two_machines_resume_on_one(team: Team, alone: Path) -> None:
    """Each machine has all shards (HSDP)."""
    asked = ("parallel=shard", *PLAIN)
    two = Team(team.context, team.path, n_machines=2)
    folder = two.train("machines", 4, *asked, kill=(3, "update:34"))
    sizes = [path.stat().st_size for path in sorted(folder.glob("checkpoints/u00000020/shards/*"))]
    assert [size > 10_000 for size in sizes] == [True, True, False, False]
    assert_same_but_for_rounding(alone, team.train("machines", 2, *asked))


class UnevenTeam(Team):
    """A machine with one process and one with the others."""

    def process(self, rank: int, n: int) -> dict[str, str]:
        local_rank, local_size = (0, 1) if rank == 0 else (rank - 1, n - 1)
        places = {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_size)}
        return super().process(rank, n) | places


def test_machines_with_different_numbers_of_processes_share_one_set_of_shards(team: Team, alone: Path) -> None:
    folder = UnevenTeam(team.context, team.path).train("uneven", 3, "parallel=shard", *PLAIN)
    assert_same_but_for_rounding(alone, folder)


def test_shards_are_averaged_like_whole_weights(team: Team) -> None:
    asked = (*PLAIN, "average=last", "average_n=2")
    whole, sharded = team.train("last1", 1, *asked), team.train("last2", 2, "parallel=shard", *asked)
    assert_same_but_for_rounding(whole, sharded)


@pytest.mark.parametrize(
    ("parallel", "before", "after"),
    [("replicate", 1, 2), ("replicate", 2, 1), ("shard", 1, 2), ("shard", 2, 1), ("shard", 2, 3)],
)
def test_resuming_with_another_number_of_processes_gives_the_same_run(
    team: Team, alone: Path, parallel: str, before: int, after: int
) -> None:
    name, asked = f"{parallel}{before}to{after}", (f"parallel={parallel}", *PLAIN)
    team.train(name, before, *asked, kill=(0, "update:34"))
    there = max(team.samples(name))
    folder = team.train(name, after, *asked)
    assert max(team.samples(name)) > there
    assert f"had {before} process{'es' * (before > 1)} until update 20 and resumes with {after}" in team.said(name)
    assert team.samples(name) == team.samples("alone")
    assert_same_but_for_rounding(alone, folder)


@pytest.mark.parametrize("parallel", ["replicate", pytest.param("shard", marks=pytest.mark.slow)])
def test_two_processes_resume_bit_identically_after_kills_and_signals(team: Team, parallel: str) -> None:
    """With dropout; compares log, model and last checkpoint."""
    name, asked = f"cut-{parallel}", (f"parallel={parallel}", *EXACT)
    whole = team.train(f"whole-{parallel}", 2, *asked)
    team.train(name, 2, *asked, kill=(0, "update:13"))  # before the first checkpoint
    assert "another process of this training exited" in team.said(name, 1)
    team.train(name, 2, *asked, kill=(0, "checkpoint:1"))  # after all shards are written
    team.train(name, 2, *asked, kill=(1, "update:27"))  # the worker
    assert "another process of this training exited" in team.said(name, 0)
    members = team.start(name, 2, *asked)
    team.wait_for_log(name, members[0], '"update": 30')
    os.kill(members[1].pid, signal.SIGTERM)  # to one process; all stop after the same update
    team.finish(members, 143, 143)
    assert "SIGTERM: stopped after update" in team.said(name, 0)
    stopped = {team.said(name, rank).split("after update ")[1].split(";")[0] for rank in (0, 1)}
    assert len(stopped) == 1
    cut = team.train(name, 2, *asked)
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
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    files = [*(path.relative_to(whole) for path in whole.glob("checkpoints/u00000040/shards/*")), "model.safetensors"]
    assert len(files) == (3 if parallel == "shard" else 1)
    assert [name for name in files if (whole / name).read_bytes() != (cut / name).read_bytes()] == []


@pytest.mark.parametrize("n", [1, 2])
def test_sigterm_interrupts_a_validation_after_everything_was_saved(team: Team, alone: Path, n: int) -> None:
    name, marker = f"stalled{n}", team.path / f"validating{n}"
    members = team.start(name, n, "--stall", str(marker), *PLAIN)
    while members[0].is_alive() and not marker.exists():
        time.sleep(0.01)
    for member in members:  # as the launcher passes it on
        os.kill(member.pid, signal.SIGTERM)
    for member in members:
        member.join(timeout=20)
    codes = [member.exitcode for member in members]
    assert codes[0] == 143 and {*codes} <= {143, LEFT}, "at once, not after the validation"
    checkpoint = RunFolder.open(team.path / name, model=False).checkpoints.latest()
    assert checkpoint is not None and checkpoint.update == 20 and checkpoint.state["training"]["validated"] < 20
    assert_same_but_for_rounding(alone, team.train(name, n, *PLAIN))


@both
def test_a_stuck_process_is_named_with_its_activity(team: Team, parallel: str) -> None:
    name = f"stuck-{parallel}"
    members = team.start(name, 2, "timeout=0.05", f"parallel={parallel}", "max_updates=100000", *PLAIN[1:])
    team.wait_for_log(name, members[0], '"update": 20')
    os.kill(members[1].pid, signal.SIGSTOP)
    members[0].join(timeout=60)
    members[1].kill()
    members[1].join()
    assert members[0].exitcode == LEFT
    assert "no answer for 0.05 minutes (training.timeout) from process 2 of 2 (" in team.said(name)


@both
def test_two_processes_skip_an_update_whose_loss_is_not_finite_in_one_of_them(team: Team, parallel: str) -> None:
    """The live weights are those that are kept, without an average."""
    asked = ("--poison", "7", *PLAIN[1:], "max_updates=10", "average=none", f"parallel={parallel}")
    one, two = team.train(f"skip1-{parallel}", 1, *asked), team.train(f"skip2-{parallel}", 2, *asked)
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


def test_an_interruption_is_reported_once(team: Team) -> None:
    src, tgt = write_corpus(team.path, "long", 60)
    limits = small("training.max_updates=100000", "training.valid_updates=100000")
    asked = ("train", "--src", src, "--tgt", tgt, *limits, "--run", team.path / "interrupted")
    members = team.command("interrupted", 2, *asked)
    team.wait_for_log("interrupted", members[0], '"update": 20')
    for member in members:  # as a terminal does
        os.kill(member.pid, signal.SIGINT)
    team.finish(members, 130, 130)
    assert "SIGINT: stopped after update" in team.said("interrupted", 0)
    assert "transduce" not in team.said("interrupted", 1)


def test_a_process_that_cannot_write_its_shard_is_named_and_stops_all(team: Team) -> None:
    """Its thread fails while both train on; the checkpoint before remains."""
    src, tgt = write_corpus(team.path, "full", 60)
    limits = [f"training.{name}_updates={n}" for name, n in {"max": 100_000, "valid": 100_000, "save": 20}.items()]
    asked = ["train", "--src", src, "--tgt", tgt, *small(*limits, "training.parallel=shard")]
    members = team.command("full", 2, *asked, "--run", team.path / "full")
    team.wait_for_log("full", members[0], '"update": 40')
    for update in range(100, 10_000, 20):
        with contextlib.suppress(FileExistsError):  # the training was faster
            (team.path / f"full/checkpoints/.u{update:08d}.shards.aside/00001.safetensors").mkdir(parents=True)
    team.finish(members, LEFT, 2)
    assert team.said("full", 1).count("process 2 of 2: cannot write") == 1
    assert "another process of this training exited" in team.said("full", 0)
    checkpoint = RunFolder.open(team.path / "full", model=False).checkpoints.latest()
    assert checkpoint is not None and checkpoint.update >= 80
