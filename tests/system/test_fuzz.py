"""The short form of `benchmarks/fuzz.py`: 300 damaged files, each loaded or refused in one clear line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def fuzz(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "fuzz.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_damaged_files_are_loaded_or_refused_in_one_line(tmp_path: Path) -> None:
    done = fuzz("--quick", "--count", 300, "--seed", 1, "--limit", 600, "--folder", tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "300 cases" in done.stdout and "bad: 0" in done.stdout
    total = next(line for line in done.stdout.splitlines() if line.startswith("| all |"))
    loaded, refused = (int(number) for number in total.split("|")[2:4])
    assert refused > 100 and loaded > 20  # some mutations are harmless
