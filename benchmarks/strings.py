"""Which models learn to copy and to reverse strings, by the length of the string.

    python benchmarks/strings.py --runs RUNS --out strings                    # 2 x 6 trainings of a few minutes

Sources are random strings of 1 to 20 of ten letters, one token each; targets are the same strings or their mirror
images. The models have 156,000 to 180,000 parameters and see the same batches. Reported is the share of strings outside
the training text whose translation (beam 5) is right in every letter, also for strings longer than any in training. A
run that RUNS contains complete is not trained again. OUT.md has the table, OUT.svg the plot.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from results import heading, row, write

from transduce import Translator
from transduce.config.recipe import apply_overrides
from transduce.config.settings import Settings
from transduce.pipeline import train

LETTERS, LONGEST = "abcdefghij", 20
PARTS = ("train", "valid")
BINS = ((4, 5), (6, 10), (11, 15), (16, 20), (21, 25))
N_TEST = 200  # strings in a bin; almost all of three letters are in the training text
SMALL = {"n_encoder_layers": 2, "n_decoder_layers": 2, "dropout": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "Transformer": {"d_model": 64, "d_ff": 128, "n_heads": 4, "residual": "pre"},
    "RNN, no attention": {
        "kind": "rnn", "attention": "none", "direction": "backward", "bridge": "copy", "d_model": 64, "d_hidden": 72,
    },
    "RNN, Bahdanau": {"kind": "rnn", "attention": "bahdanau", "cell": "gru", "d_model": 48, "d_hidden": 72},
    "RNN, Luong": {"kind": "rnn", "attention": "general", "d_model": 48, "d_hidden": 72},
    "ConvS2S": {"kind": "convs2s", "d_model": 64, "d_conv": 64, "max_positions": 257},
    "Star encoder": {"kind": "star", "d_model": 64, "d_ff": 128, "n_heads": 4, "residual": "pre"},
}  # fmt: skip
TRAINING = {
    "optimizer": "muon", "lr": 0.005, "matrix_lr": 0.01, "label_smoothing": 0.0, "ema_decay": 0.98,
    "batch_tokens": 2048, "max_updates": 1500, "valid_updates": 500, "warmup_updates": 100, "schedule": "linear",
}  # fmt: skip


def strings(lengths: tuple[int, int], seed: int) -> Iterator[str]:
    """Random strings, without end."""
    draw = random.Random(seed)
    while True:
        yield "".join(draw.choices(LETTERS, k=draw.randint(*lengths)))


def train_all(args: argparse.Namespace) -> dict[tuple[str, str], Path]:
    """A run folder for each task and model."""
    runs = {}
    for task, step in (("copy", 1), ("reverse", -1)):
        folder = args.runs / task
        folder.mkdir(parents=True, exist_ok=True)
        for name, n, seed in (("train", 60_000, 1), ("valid", 500, 2)):
            sources = list(islice(strings((1, LONGEST), seed), n))
            (folder / f"{name}.src").write_text("".join(f"{one}\n" for one in sources))
            (folder / f"{name}.tgt").write_text("".join(f"{one[::step]}\n" for one in sources))
        for name in args.models:
            files = {part: [{"src": str(folder / f"{part}.src"), "tgt": str(folder / f"{part}.tgt")}] for part in PARTS}
            values: dict[str, Any] = {
                "data": files, "tokenizer": {"kind": "char"}, "model": {**SMALL, **MODELS[name]},
                "training": dict(TRAINING), "decoding": {"max_length": 2 * LONGEST},
            }  # fmt: skip
            apply_overrides(values, args.set)
            runs[task, name] = folder / name.replace(",", "").replace(" ", "-")
            train(Settings.from_mapping(values), runs[task, name])
    return runs


def measure(runs: dict[tuple[str, str], Path]) -> dict[tuple[str, str], list[float]]:
    """Shares of right strings by length, of each task and model."""
    found = {}
    for (task, name), run in runs.items():
        translator = Translator.load(run, device="cpu")
        seen = set((run.parent / "train.src").read_text().split())
        shares = []
        for number, lengths in enumerate(BINS):
            new = (one for one in strings(lengths, 100 + number) if one not in seen)
            sources = list(islice(new, N_TEST))
            outputs = [one.text for one in translator.translate(sources)]
            right = [source if task == "copy" else source[::-1] for source in sources]
            shares.append(sum(a == b for a, b in zip(outputs, right, strict=True)) / N_TEST)
        found[task, name] = shares
        print(f"# {task}, {name}: {shares}", file=sys.stderr)
    return found


def table(found: dict[tuple[str, str], list[float]]) -> list[str]:
    """Markdown."""
    lines = heading("task", "model", *(f"{low} to {high}" for low, high in BINS))
    return lines + [row(*key, *(f"{share:.1%}" for share in shares)) for key, shares in found.items()]


def plot(found: dict[tuple[str, str], list[float]], path: Path) -> None:
    """The share over the length, a panel for each task."""
    import matplotlib.pyplot as plt

    tasks = dict.fromkeys(task for task, _ in found)
    _, panels = plt.subplots(1, len(tasks), figsize=(9, 4), layout="constrained", sharey=True, squeeze=False)
    for axes, task in zip(panels[0], tasks, strict=True):
        for (own, name), shares in found.items():
            if own == task:
                axes.plot([(low + high) / 2 for low, high in BINS], shares, "o-", label=name)
        axes.axvline(LONGEST + 0.5, color="gray", linestyle=":")
        axes.set(title=task, xlabel="letters", ylabel="strings without a mistake")
        axes.grid(alpha=0.3)
    panels[0][0].legend(fontsize="small")
    plt.savefig(path)


def main() -> None:
    """Train, measure, write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder for data and run folders")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="other settings of all trainings")
    parser.add_argument("--out", type=Path, help="OUT.md and OUT.svg are written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(train_all(args))
    write(table(found), partial(plot, found), args.out)


if __name__ == "__main__":
    main()
