"""The launcher, with small scripts as processes."""

import json
import logging
import os
import signal
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from transduce import pipeline
from transduce.distributed import launch
from transduce.distributed.group import GroupRanks
from transduce.distributed.launch import ProcessRank
from transduce.errors import RankExited, SettingsError, TooLong, TrainingError

KILLED = "import os; os.kill(os.getpid(), 9)"
FOREVER = "import time; time.sleep(60)"


def run(*scripts: str) -> int:
    """Launch processes of these lines of Python, in order of their rank."""
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in signals}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())
        try:
            return launch.launch(["-S", "-c", f"import os; exec({scripts}[int(os.environ['RANK'])])"], len(scripts))
        finally:  # what the launcher does not restore, as its process ends
            logging.disable(logging.NOTSET)
            for number, handler in handlers.items():
                signal.signal(number, handler)


@pytest.mark.loopback
def test_every_process_gets_its_rank_and_its_share_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    write = f"import json; json.dump(dict(os.environ), open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w'))"
    assert run(write, write) == 0
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert [ProcessRank.of(one) for one in found] == [ProcessRank(rank, 2, rank, 2, launched=True) for rank in range(2)]
    assert {one["OMP_NUM_THREADS"] for one in found} == {str(max(1, len(os.sched_getaffinity(0)) // 2))}
    assert {one["MASTER_ADDR"] for one in found} == {"localhost"}
    assert {one["PYTHONSAFEPATH"] for one in found} == {"1"}


@pytest.mark.loopback
def test_a_killed_process_is_named_and_the_others_exit(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(FOREVER, KILLED) == 137
    error = capfd.readouterr().err
    assert "process 2 of 2 was killed by SIGKILL" in error and "resume" in error and error.count("\n") == 1


@pytest.mark.loopback
def test_signals_are_forwarded(tmp_path: Path) -> None:
    waiting = (
        "import signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(open({str(tmp_path)!r} + '/stopped', 'a').write('x')))\n"
        f"open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').close()\n"
        "time.sleep(60)"
    )

    def ask() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=ask)
    thread.start()
    assert run(waiting, waiting) == 143
    thread.join()
    assert (tmp_path / "stopped").read_text() == "xx"


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ({0: 2, 1: -signal.SIGTERM}, 2),  # a user's mistake, which the other ranks wait for
        ({0: RankExited.exit_code, 1: 1}, 1),
        ({0: 1, 1: RankExited.exit_code}, 1),
        ({0: 130, 1: 130}, 130),
        ({0: RankExited.exit_code, 1: 143}, 143),
        ({0: -signal.SIGKILL, 1: RankExited.exit_code}, 137),
        ({0: 143, 1: -signal.SIGKILL}, 137),
    ],
)
def test_the_exit_code_is_that_of_the_process_that_stopped_the_others(
    codes: dict[int, int], expected: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch.report_failures(codes, 2) == expected
    assert ("was killed by SIGKILL" in capfd.readouterr().err) == (-signal.SIGKILL in codes.values())


@pytest.mark.parametrize(
    ("codes", "lost"),
    [
        ({0: RankExited.exit_code, 1: -signal.SIGKILL}, True),
        ({0: 143, 1: -signal.SIGKILL}, True),  # torchrun stops the others with SIGTERM
        ({0: RankExited.exit_code}, True),  # another one does not answer
        ({0: 2, 1: -signal.SIGTERM}, False),
        ({0: RankExited.exit_code, 1: 1}, False),
        ({0: RankExited.exit_code, 1: 143}, False),
    ],
)
def test_only_a_lost_process_is_a_reason_to_start_again(codes: dict[int, int], lost: bool) -> None:
    assert launch._is_loss(codes) == lost


def test_an_ignored_signal_is_not_forwarded() -> None:
    """Of nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launch._signals_to_forward() == ["SIGTERM", "SIGINT"]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_worker_reports_only_its_own_sentence_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Errors that all processes see are reported by the main process."""
    for name, value in RANK_1_OF_2.items():
        monkeypatch.setenv(name, value)
    for error, said in ((TooLong("too long"), "process 2 of 2: too long"), (TrainingError("a loss"), "")):
        monkeypatch.setattr(pipeline, "join_ranks", Mock(side_effect=error))
        assert pipeline.run_worker() == 1
        assert capfd.readouterr().err == (f"transduce: error: {said}\n" if said else "")


def test_restarts_need_several_processes() -> None:
    with pytest.raises(SettingsError, match="--max-restarts 3: needs --processes"):
        launch.launch_if_asked(1, max_restarts=3)


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
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
        ({"RANK": ""}, "RANK= of WORLD_SIZE=2"),
        ({"RANK": "-1"}, "RANK=-1 of"),
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
    ranks = GroupRanks.__new__(GroupRanks)
    ranks.process = ProcessRank(3, 4, 1, 2)
    assert ranks.bind_device(torch.device("cuda")) == torch.device("cuda", 1) and current == [torch.device("cuda", 1)]
    assert ranks.bind_device(torch.device("cpu")) == torch.device("cpu")
