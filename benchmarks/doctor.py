"""Compare predictions of the doctor with measurements: memory of the worst batch, and a short training.

    python benchmarks/doctor.py memory                       # the built-in corpus, several model sizes
    python benchmarks/doctor.py training RECIPE --data FOLDER --updates 120

`memory`: peak of the worst batch, extrapolated from a sixteenth, an eighth and a quarter of its tokens, and measured in
a fresh process. `training`: the doctor's predictions, and measurements of a real `transduce train`.
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
from dataclasses import asdict
from pathlib import Path

from transduce.config import Settings
from transduce.doctor.diagnose import diagnose
from transduce.doctor.estimates import Point, extrapolate
from transduce.doctor.trial import Rehearsal
from transduce.logging import Log
from transduce.machine import this_machine
from transduce.runs.folder import RunFolder
from transduce.tasks.resolve import check, resolve

SIZES = {
    "tiny": (8192, {}),
    "small": (4096, {}),
    "base": (4096, {}),
    "gpt-small": (4096, {"task": "causal"}),
    "bert-mini": (4096, {"task": "masked"}),
}


def prepare(name: str, tokens: int, more: dict[str, str], folder: Path) -> Path:
    """A run folder with encoded text, as training creates it."""
    data: dict[str, object] = {"demo": 4000}
    if more:
        from transduce.demo.corpus import demo_pairs

        text = folder / "text.txt"
        text.write_text("\n".join(pair.src for pair in demo_pairs("train", 6000, seed=1)), encoding="utf-8")
        data = {"train": [{"path": str(text)}], "context": 256}
    settings = Settings.from_mapping(
        {
            **more,
            "data": data,
            "model": {"preset": name},
            "tokenizer": {"vocab_size": 2000},
            "training": {"batch_tokens": tokens, "micro_batch_tokens": tokens, "max_updates": 10, "device": "cpu"},
        }
    )
    task, log = check(settings), Log(quiet=True)
    texts = task.read(settings, log)
    settings, tokenizers = resolve(task, settings, texts, this_machine("cpu"), log)
    with RunFolder.create(folder / "run", settings, "") as run:
        run.write_settings(settings)
        task.encode(run, texts, tokenizers, settings, log)
    return folder / "run"


def child(folder: Path, shares: list[float]) -> list[Point]:
    """Peaks of batches with these shares of the tokens, in a separate process."""
    command = [sys.executable, __file__, "child", str(folder), *map(str, shares)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [Point(**json.loads(line)) for line in done.stdout.splitlines()]


def memory() -> None:
    """Print predicted and measured memory for several model sizes."""
    print(f"{'model':<12} {'tokens':>7} {'predicted MiB':>14} {'measured MiB':>13} {'ratio':>6}")
    for name, (tokens, more) in SIZES.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = prepare(name, tokens, more, Path(temporary))
            predicted = extrapolate(child(folder, [1 / 16, 1 / 8, 1 / 4]))
            real = extrapolate(child(folder, [1.0]))
            assert predicted is not None and real is not None
            a, b = predicted.worst / 2**20, real.worst / 2**20
            print(f"{name:<12} {tokens:>7,} {a:>14,.0f} {b:>13,.0f} {a / b:>6.2f}", flush=True)


def training(recipe: Path, data: Path, updates: int) -> None:
    """Print the figures of the doctor and of a training."""
    overrides = [f"training.max_updates={updates}", f"training.valid_updates={updates // 2}", "data.test=[]"]
    settings = Settings.from_toml(recipe, [*overrides, f"data.root={data.absolute()}"])
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        found = diagnose(settings, run=run)
        assert found.trial is not None and found.trial.memory is not None and found.time is not None
        options = [part for value in overrides for part in ("--set", value)]
        command = [sys.executable, "-m", "transduce", "train", str(recipe), "--data", str(data), "--run", str(run)]
        began = time.time()
        subprocess.run([*command, "--quiet", *options], check=True)
        whole = time.time() - began
        end = next(e for e in map(json.loads, (run / "metrics.jsonl").open()) if e["event"] == "end")
        size = sum(path.stat().st_size for path in next((run / "checkpoints").iterdir()).iterdir())
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    rows = {
        "peak memory, MiB": (found.trial.memory.worst / 2**20, peak / 2**20),
        "updates and validations, s": (found.time.updating + found.time.validating, end["seconds"]),
        "the whole command, s": (found.time.total, whole),
        "checkpoint, MiB": (found.trial.checkpoint_bytes / 2**20, size / 2**20),
    }
    print(f"{'':<28} {'predicted':>10} {'measured':>10} {'ratio':>6}   (the doctor took {found.seconds:.1f} s)")
    for name, (a, b) in rows.items():
        print(f"{name:<28} {a:>10,.1f} {b:>10,.1f} {a / b:>6.2f}")


def main() -> None:
    """Parse the command line and run a comparison."""
    if sys.argv[1:2] == ["child"]:
        rehearsal = Rehearsal(RunFolder.open(Path(sys.argv[2]), model=False))
        for point in rehearsal.memory(time.monotonic() + 1e6, tuple(map(float, sys.argv[3:]))):
            print(json.dumps(asdict(point)), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["memory", "training"])
    parser.add_argument("recipe", type=Path, nargs="?")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--updates", type=int, default=120)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    memory() if given.what == "memory" else training(given.recipe, given.data, given.updates)


if __name__ == "__main__":
    main()
