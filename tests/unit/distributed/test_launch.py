"""The launcher, with small scripts as processes."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from transduce.distributed import group, launch
from transduce.distributed.environment import EXIT_RANK_LOST, ProcessRank
from transduce.distributed.group import GroupRanks
from transduce.errors import SettingsError, TooLong, TrainingError

FOREVER = "import time; time.sleep(60)"


def run(*codes: str, grace: float = 5.0) -> int:
    """Launch processes of these lines of Python, in order of their rank."""
    original = launch._start

    def start(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return original(["-S", "-c", arguments[int(environment["RANK"])]], environment)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_COMMAND", ())
        patch.setattr(launch, "_start", start)
        patch.setattr(launch, "GRACE", grace)
        return launch.launch(codes, len(codes))


def test_the_exit_code_is_that_of_the_process_that_failed_first(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("import time; time.sleep(0.2)", "") == 0
    assert run("raise SystemExit(130)", "raise SystemExit(130)") == 130
    assert run("raise SystemExit(2)", FOREVER, FOREVER) == 2  # a user's mistake, which the other ranks wait for
    assert run(f"raise SystemExit({EXIT_RANK_LOST})", "raise SystemExit(1)") == 1
    assert run("raise SystemExit(1)", f"raise SystemExit({EXIT_RANK_LOST})") == 1
    assert capfd.readouterr().err == ""


def test_a_killed_process_is_named_and_the_others_exit(capfd: pytest.CaptureFixture[str]) -> None:
    killed = "import os; os.kill(os.getpid(), 9)"

    def assert_names(number: int) -> None:
        assert f"process {number} of 2 was killed by SIGKILL" in (line := capfd.readouterr().err)
        assert "resume" in line and line.count("\n") == 1

    assert run(f"raise SystemExit({EXIT_RANK_LOST})", killed) == 1
    assert_names(2)
    assert run(FOREVER, killed, grace=0.1) == 1  # this one does not notice
    assert_names(2)
    assert run(killed, FOREVER) == 137
    assert_names(1)


def test_signals_are_forwarded_and_our_own_handlers_restored(tmp_path: Path) -> None:
    waiting = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\n"
        f"open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').close()\n"
        "time.sleep(60)"
    )

    def ask() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=ask)
    thread.start()
    assert run(waiting, waiting) == 130
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_every_process_gets_its_rank_and_its_share_of_the_cores(tmp_path: Path) -> None:
    given = {"PATH": "x"}
    ours = [launch._environment(given, rank, 2, tmp_path / "rendezvous") for rank in range(2)]
    assert [ProcessRank.of(one) for one in ours] == [
        ProcessRank(rank, 2, rank, 2, tmp_path / "rendezvous") for rank in range(2)
    ]
    assert ours[0]["PATH"] == "x" and int(ours[0]["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    assert launch._environment({"OMP_NUM_THREADS": "7"}, 0, 2, tmp_path)["OMP_NUM_THREADS"] == "7"


def test_a_worker_reports_only_its_own_sentence_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Errors that all processes see are reported by the main process."""
    for name, value in (RANK_1_OF_2 | {"TRANSDUCE_RENDEZVOUS": "x"}).items():
        monkeypatch.setenv(name, value)
    for error, said in ((TooLong("too long"), "process 2 of 2: too long"), (TrainingError("a loss"), "")):
        monkeypatch.setattr(group, "join_ranks", Mock(side_effect=error))
        assert group.run_worker(Mock()) == 1
        assert capfd.readouterr().err == (f"transduce: error: {said}\n" if said else "")


RANK_1_OF_2 = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        RANK_1_OF_2 | {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "two"},
        *({name: value for name, value in RANK_1_OF_2.items() if name != lacking} for lacking in RANK_1_OF_2),
    ],
)
def test_a_process_without_rank_variables_is_alone(environment: dict[str, str]) -> None:
    """Clusters set some of the variables for all jobs; these are not enough."""
    assert ProcessRank.of(environment) == ProcessRank()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"RANK": ""}, "RANK=''"),
        ({"RANK": "-1"}, "RANK='-1'"),
        ({"RANK": "2"}, "RANK=2 of WORLD_SIZE=2"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1 of LOCAL_WORLD_SIZE=1"),
    ],
)
def test_an_invalid_environment_is_a_one_line_error(wrong: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError, match=f"{said}.*unset RANK to train alone"):
        ProcessRank.of(RANK_1_OF_2 | wrong)


def test_each_process_uses_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """By number: the current device is not known in other threads."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.distributed, "new_group", lambda **_: None)
    ranks = GroupRanks.__new__(GroupRanks)
    ranks.process = ProcessRank(3, 4, 1, 2)
    assert ranks.bind_device(torch.device("cuda")) == torch.device("cuda", 1) and current == [torch.device("cuda", 1)]
    assert ranks.bind_device(torch.device("cpu")) == torch.device("cpu")
