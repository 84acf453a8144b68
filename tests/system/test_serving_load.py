"""The short form of `benchmarks/serving.py`: the service under load, and what clients do wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import marians

pytestmark = [pytest.mark.loopback, pytest.mark.slow]
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_the_service_keeps_its_promises_under_load(tmp_path: Path) -> None:
    run = marians.make_run(tmp_path / "toy")
    (tmp_path / "lines").write_text("".join(f"{line}\n" for line in marians.LINES), encoding="utf-8")
    names = ["malformed", "streams", "mixed", "overload", "shutdown"]
    command = [sys.executable, BENCHMARKS / "serving.py", *names, "--run", run, "--text", tmp_path / "lines"]
    done = subprocess.run([*map(str, command), "--scale", "0.001"], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert all(f"{name}:" in done.stdout for name in ("malformed", "streams", "mixed", "overload", "SIGTERM"))
