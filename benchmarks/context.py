"""Validation loss of Transformer-XL against its memory, compared with the same model without one, at equal time.

    python benchmarks/context.py --data FOLDER --out context                 # about 25 minutes
    python benchmarks/context.py --data FOLDER --out longer --set data.context=128 model.memory_length=128
    python benchmarks/context.py --data FOLDER --out try --minutes 0.5 --characters 5000

Both models are trained by recipes/shakespeare-xl.toml for `--minutes` each, one with `model.memory_length = 0`: a
token sees its own segment only. Then the validation text (its first `--characters`) is scored with each length of the
memory, which needs no further training. The runs stay in OUT/, and a second call does not train them again.
OUT.md has the tables, OUT.svg the plot.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from results import heading, row, write

RECIPE = Path(__file__).parents[1] / "recipes" / "shakespeare-xl.toml"
MEMORIES = (0, 16, 32, 64, 128, 256, 512, 1024)
MODELS = {"with memory": (), "without memory": ("model.memory_length=0",)}


def train(name: str, args: argparse.Namespace) -> Path:
    """The finished run of a model."""
    folder = args.out / name.replace(" ", "-")
    settings = (f"training.max_minutes={args.minutes}", *args.set, *MODELS[name])
    overrides = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "transduce", "train", RECIPE, "--data", args.data, "--run", folder, *overrides]
    subprocess.run([str(part) for part in command], check=True)
    return folder


def measure(folder: Path, text: Path, memory: int) -> float:
    """Nats per character of a text with this length of the memory."""
    command = [sys.executable, "-m", "transduce", "evaluate", folder, "--text", text, "--memory", memory, "--json"]
    done = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True)
    return float(json.loads(done.stdout)["nll"])


def facts(folder: Path) -> dict[str, Any]:
    """Updates, minutes and speed of a run."""
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (end,) = (event for event in events if event["event"] == "end")
    speeds = sorted(event["tokens_per_second"] for event in events if event["event"] == "update")
    return {"updates": end["update"], "minutes": end["minutes"], "speed": speeds[len(speeds) // 2]}


def plot(losses: dict[str, dict[int, float]], path: Path) -> None:
    """Loss over the length of the memory."""
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, by_memory in losses.items():
        axes.plot(list(by_memory), list(by_memory.values()), "o-", label=f"trained {name}")
    axes.set_xscale("symlog", base=2, linthresh=16)
    axes.set(xlabel="memory in evaluation, characters before the segment", ylabel="nats per character")
    axes.grid(alpha=0.3)
    axes.legend()
    plt.savefig(path)


def main() -> None:
    """Train both models, score the validation text with each memory, write the tables and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.txt and valid.txt")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; OUT.md and OUT.svg are written")
    parser.add_argument("--minutes", type=float, default=10, help="of training, for each model")
    parser.add_argument("--memories", nargs="+", type=int, default=list(MEMORIES))
    parser.add_argument("--characters", type=int, help="of validation text that is scored (default: all)")
    parser.add_argument("--set", action="append", default=[], help="another setting of both models")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    text = args.out / "text.txt"
    text.write_text((args.data / "valid.txt").read_text(encoding="utf-8")[: args.characters], encoding="utf-8")
    runs = {name: train(name, args) for name in MODELS}
    losses = {name: {n: measure(folder, text, n) for n in args.memories} for name, folder in runs.items()}
    lines = heading("trained", "updates", "minutes", "characters/s")
    for name, folder in runs.items():
        found = facts(folder)
        lines.append(row(name, f"{found['updates']:,}", f"{found['minutes']:.1f}", f"{found['speed']:,.0f}"))
    lines += ["", *heading("nats per character, memory of", *args.memories)]
    for name, by_memory in losses.items():
        lines.append(row(f"trained {name}", *(f"{loss:.4f}" for loss in by_memory.values())))
    write(lines, partial(plot, losses), args.out)


if __name__ == "__main__":
    main()
