"""`--processes 2` and torchrun as a user runs them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from system.commands import small, write_corpus

pytestmark = pytest.mark.loopback  # its own server, or its own processes

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--")  # --run is torchrun's too


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", *map(str, arguments)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # sums on a CPU depend on the number of threads
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=one_thread)


def wait_for(text: str, metrics: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the log contains the text."""
    while process.poll() is None and not (metrics.exists() and text in metrics.read_text()):
        time.sleep(0.002)


def error_lines(error: str) -> list[str]:
    return [line for line in error.splitlines() if line.startswith("transduce: error:")]


@pytest.mark.slow
def test_runs_that_are_stopped_and_that_lose_processes_end_alike(tmp_path: Path) -> None:
    """torchrun resumes after SIGTERM; each rank is killed once, and all restart. The weights are the same."""
    src, tgt = write_corpus(tmp_path, "train", 200)
    limits = ("training.max_updates=60", "training.valid_updates=20", "training.batch_tokens=128")
    text = ["transduce", "train", "--src", src, "--tgt", tgt, *small(*limits)]
    stopped, killed = tmp_path / "stopped", tmp_path / "killed"
    metrics = stopped / "metrics.jsonl"

    process = start(*text, "--run", stopped, "--processes", 2)
    wait_for('"update": 30', metrics, process)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 143
    assert len(error_lines(error)) == 1 and "SIGTERM: stopped after update" in error and "Traceback" not in error

    process = start(*TORCHRUN, *text, "--run", stopped)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [event["update"] for event in events if event["event"] == "update"] == list(range(10, 61, 10))
    assert [event["event"] for event in events].count("restart") == 1
    assert events[-1]["event"] == "end" and events[-1]["update"] == 60
    assert (stopped / "report.html").exists() and not (stopped / "tokens").exists()

    process = start(*text, "--run", killed, "--processes", 2, "--max-restarts", 2)
    for update, wanted in ((30, "LOCAL_RANK=0"), (50, "LOCAL_RANK=1")):
        wait_for(f'"update": {update}', killed / "metrics.jsonl", process)
        os.kill(child_with(wanted, process.pid), signal.SIGKILL)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert error.count("of 2 was killed by SIGKILL; all start again from the last checkpoint") == 2
    assert (stopped / "model.safetensors").read_bytes() == (killed / "model.safetensors").read_bytes()


def child_with(variable: str, parent: int) -> int:
    """The child process with this variable in its environment (Linux)."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return next(
        int(pid) for pid in children if variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )
