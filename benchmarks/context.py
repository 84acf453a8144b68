"""Validation loss of Transformer-XL against its memory, compared with the same model without one, at equal time.

    python benchmarks/context.py --data FOLDER --out context                 # about 30 minutes
    python benchmarks/context.py --data FOLDER --out longer --set data.context=128 model.memory_length=128
    python benchmarks/context.py --data FOLDER --out try --minutes 0.5 --characters 5000

`transduce compare` trains recipes/shakespeare-xl.toml for `--minutes` twice, the second time with
`model.memory_length = 0`: a token sees its own segment only. Then the validation text (its first `--characters`) is
scored with each length of the memory, which needs no further training. The runs stay in OUT/, and a second call does
not train them again. OUT.md has the tables, OUT.svg the plot.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

from results import heading, row, write

from transduce import compare
from transduce.config.recipe import apply_overrides, read_recipe

RECIPE = Path(__file__).parents[1] / "recipes" / "shakespeare-xl.toml"
MEMORIES = (0, 16, 32, 64, 128, 256, 512, 1024)
MODELS = {"with-memory": (), "without-memory": ("model.memory_length=0",)}


def measure(folder: Path, text: Path, memory: int) -> float:
    """Nats per character of a text with this length of the memory."""
    command = [sys.executable, "-m", "transduce", "evaluate", folder, "--text", text, "--memory", memory, "--json"]
    done = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True)
    return float(json.loads(done.stdout)["nll"])


def plot(losses: dict[str, dict[int, float]], path: Path) -> None:
    """Loss over the length of the memory."""
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, by_memory in losses.items():
        axes.plot(list(by_memory), list(by_memory.values()), "o-", label=f"trained {name.replace('-', ' ')}")
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
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="other settings of both models")
    args = parser.parse_args()
    recipes = {}
    for name, own in MODELS.items():
        recipes[name] = read_recipe(RECIPE)
        apply_overrides(recipes[name], [*args.set, *own])
    found = compare(recipes, args.out, minutes=args.minutes, data=args.data)
    text = args.out / "text.txt"
    text.write_text((args.data / "valid.txt").read_text(encoding="utf-8")[: args.characters], encoding="utf-8")
    losses = {name: {n: measure(args.out / name / "seed1", text, n) for n in args.memories} for name in MODELS}
    lines = heading("trained", "updates", "minutes", "characters/s")
    for one in found.systems:
        speed = "" if one.tokens_per_second is None else f"{one.tokens_per_second:,.0f}"
        lines.append(row(one.name, f"{one.updates:,.0f}", f"{one.minutes:.1f}", speed))
    lines += ["", *heading("nats per character, memory of", *args.memories)]
    for name, by_memory in losses.items():
        lines.append(row(name, *(f"{loss:.4f}" for loss in by_memory.values())))
    write(lines, partial(plot, losses), args.out)


if __name__ == "__main__":
    main()
