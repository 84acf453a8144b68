"""`--processes 2` and torchrun as a user runs them: killed, stopped, gone on with; and a mistake is told once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from commands import small, write_corpus

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the processes in /proc")

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "transduce")


def start(*arguments: object, through: Sequence[str] = ("transduce",)) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", *through, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rank_of(launcher: subprocess.Popen[str], rank: int) -> int:
    """The number of the process of this rank."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return next(int(pid) for pid in children if f"\0RANK={rank}\0" in f"\0{Path(f'/proc/{pid}/environ').read_text()}")


def wait_for(text: str, metrics: Path, process: subprocess.Popen[str]) -> None:
    """Until the log holds it."""
    while process.poll() is None and not (metrics.exists() and text in metrics.read_text()):
        time.sleep(0.002)


def told(error: str) -> list[str]:
    return [line for line in error.splitlines() if line.startswith("transduce: error:")]


def test_killed_stopped_and_finished(tmp_path: Path) -> None:
    src, tgt = write_corpus(tmp_path, "train", 200)
    run = tmp_path / "run"
    limits = ("training.max_updates=150", "training.valid_updates=50", "training.batch_tokens=128")
    asked = ["train", "--src", src, "--tgt", tgt, "--run", run, *small(*limits)]
    metrics = run / "metrics.jsonl"

    process = start(*asked, "--processes", 2)
    wait_for('"update": 60', metrics, process)
    subprocess.run(["kill", "-KILL", str(rank_of(process, 1))], check=True)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert told(error) == [
        "transduce: error: process 2 of 2 was ended by SIGKILL, and with it the others; "
        "the same command goes on from the last checkpoint"
    ]
    assert "Traceback" not in error

    process = start(*asked, "--processes", 2)
    wait_for('"restart"', metrics, process)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(told(error)) == 1 and "SIGTERM: stopped after update" in error and "Traceback" not in error

    process = start(*asked, through=TORCHRUN)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [event["update"] for event in events if event["event"] == "update"] == list(range(10, 151, 10))
    assert [event["event"] for event in events].count("restart") == 2
    assert events[-1]["event"] == "end" and events[-1]["update"] == 150
    assert (run / "report.html").exists() and not (run / "tokens").exists()


def test_a_mistake_is_told_once_and_ends_all(tmp_path: Path) -> None:
    """Found when the first process reads, while the second waits for it."""
    src, tgt = write_corpus(tmp_path, "train", 20)
    tgt.write_text("Eins.\n", encoding="utf-8")
    run = tmp_path / "run"
    process = start("train", "--src", src, "--tgt", tgt, "--run", run, *small(), "--processes", 2)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert len(told(error)) == 1 and "train.de" in error and "Traceback" not in error
    assert not run.exists()
