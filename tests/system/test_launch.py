"""`--processes 2` and torchrun as a user runs them: torchrun resumes a run that `--processes` started."""

from __future__ import annotations

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
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(text: str, metrics: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the log contains the text."""
    while process.poll() is None and not (metrics.exists() and text in metrics.read_text()):
        time.sleep(0.002)


def error_lines(error: str) -> list[str]:
    return [line for line in error.splitlines() if line.startswith("transduce: error:")]


def test_torchrun_resumes_a_run_of_processes_after_sigterm(tmp_path: Path) -> None:
    src, tgt = write_corpus(tmp_path, "train", 200)
    run = tmp_path / "run"
    limits = ("training.max_updates=150", "training.valid_updates=50", "training.batch_tokens=128")
    asked = ["transduce", "train", "--src", src, "--tgt", tgt, "--run", run, *small(*limits)]
    metrics = run / "metrics.jsonl"

    process = start(*asked, "--processes", 2)
    wait_for('"update": 30', metrics, process)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 143
    assert len(error_lines(error)) == 1 and "SIGTERM: stopped after update" in error and "Traceback" not in error

    process = start(*TORCHRUN, *asked)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [event["update"] for event in events if event["event"] == "update"] == list(range(10, 151, 10))
    assert [event["event"] for event in events].count("restart") == 1
    assert events[-1]["event"] == "end" and events[-1]["update"] == 150
    assert (run / "report.html").exists() and not (run / "tokens").exists()


def test_a_lost_process_restarts_all_from_the_last_checkpoint(tmp_path: Path) -> None:
    """Killed once in each rank; the weights are those of a training without kills."""
    src, tgt = write_corpus(tmp_path, "train", 200)
    limits = ("training.max_updates=60", "training.valid_updates=20", "training.batch_tokens=128")
    weights = []
    for name, kills in (("whole", []), ("killed", ["LOCAL_RANK=0", "LOCAL_RANK=1"])):
        run = tmp_path / name
        asked = ["transduce", "train", "--src", src, "--tgt", tgt, "--run", run, *small(*limits)]
        process = start(*asked, "--processes", 2, "--max-restarts", 2)
        for number, wanted in enumerate(kills):
            wait_for(f'"update": {20 * number + 30}', run / "metrics.jsonl", process)
            os.kill(child_with(wanted, process.pid), signal.SIGKILL)
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        assert error.count("all start again from the last checkpoint") == len(kills)
        weights.append((run / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def child_with(variable: str, parent: int) -> int:
    """The child process with this variable in its environment (Linux)."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return next(
        int(pid) for pid in children if variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )
