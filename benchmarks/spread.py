"""Differences of validation losses that are not promised to be equal: threads, precision; and, to compare, the seed.

python benchmarks/spread.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import kills  # noqa: E402

CASES = {
    "the same again": ("1", ()),
    "two threads": ("2", ()),
    "bfloat16": ("1", ("training.precision=bfloat16",)),
    "another seed": ("1", ("training.seed=2",)),
}


def validation_loss(folder: Path, name: str, threads: str, more: tuple[str, ...]) -> float:
    sets = [part for value in (*more, "model.d_model=64", "model.d_ff=128") for part in ("--set", value)]
    command = [sys.executable, "-m", "transduce", *kills.command_of(folder, name), *sets]
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run(command, check=True, env=environment)
    return [event["loss"] for event in kills.events(folder / name) if event["event"] == "validation"][-1]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kills.write_texts(folder)
        first = validation_loss(folder, "first", "1", ())
        for number, (case, (threads, more)) in enumerate(CASES.items()):
            loss = validation_loss(folder, f"run{number}", threads, more)
            print(f"{case:16} validation loss {loss:.6f}, {loss - first:+.2e} from the first")


if __name__ == "__main__":
    main()
