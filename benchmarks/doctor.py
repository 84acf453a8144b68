"""Compare predictions of the doctor with a real training.

python benchmarks/doctor.py RECIPE --data FOLDER --updates 120
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from transduce.config.settings import Settings
from transduce.doctor.diagnose import diagnose


def main() -> None:
    """Print the figures of the doctor and of `transduce train`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--updates", type=int, default=120)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    updates = given.updates
    overrides = [f"training.max_updates={updates}", f"training.valid_updates={updates}", "data.test=[]"]
    settings = Settings.from_toml(given.recipe, [*overrides, f"data.root={given.data.absolute()}"])
    began = time.monotonic()
    found = diagnose(settings)
    took = time.monotonic() - began
    assert found.trial is not None and found.trial.peak is not None and found.time is not None
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        options = [part for value in overrides for part in ("--set", value)]
        command = [sys.executable, "-m", "transduce", "train", str(given.recipe), "--data", str(given.data)]
        subprocess.run([*command, "--run", str(run), "--quiet", *options], check=True)
        events = list(map(json.loads, (run / "metrics.jsonl").open()))
    seconds = max(event["seconds"] for event in events if event["event"] == "update")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    rows = {
        "peak memory, MiB": (found.trial.peak / 2**20, peak / 2**20),
        "updates without validations, s": (found.time.seconds, seconds),
    }
    print(f"{'':<32} {'predicted':>10} {'measured':>10} {'ratio':>6}   (the doctor took {took:.1f} s)")
    for name, (a, b) in rows.items():
        print(f"{name:<32} {a:>10,.1f} {b:>10,.1f} {a / b:>6.2f}")


if __name__ == "__main__":
    main()
