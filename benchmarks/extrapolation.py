"""Loss of a language model on longer input than it was trained on, for each positional scheme.

    python benchmarks/extrapolation.py --data FOLDER --runs RUNS --out extrapolation         # 7 x 2,000 updates
    python benchmarks/extrapolation.py --data FOLDER --runs RUNS --set training.max_updates=20 --schemes t5 none

FOLDER contains train.txt and valid.txt of "tiny Shakespeare". Each scheme is trained with recipes/shakespeare-gpt.toml,
which reads 64 characters at once. Then the validation text is cut into rows of 1, 2 and 4 times that length, and the
table gives the mean nats per character: of all characters, and of those at positions beyond the trained length. Each
row starts without a past. Learned positions have none beyond those that were trained. A run that RUNS contains
complete is not trained again. OUT.md has the table, OUT.svg the loss at each position.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from results import heading, row, write
from torch import Tensor
from torch.nn import functional as F

from transduce.config.recipe import apply_overrides, read_recipe
from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.decoding.open_run import open_model
from transduce.nn.positions import POSITIONS
from transduce.pipeline import train

RECIPE = Path(__file__).parents[1] / "recipes" / "shakespeare-gpt.toml"
SCHEMES = [name for name in POSITIONS if name != "sinusoidal_halves"]  # the same up to the order of columns
TIMES = (1, 2, 4)


def train_all(args: argparse.Namespace) -> dict[str, Path]:
    """A run folder for each scheme."""
    runs: dict[str, Path] = {}
    for scheme in args.schemes:
        values = read_recipe(RECIPE)
        apply_overrides(values, [*args.set, f"model.positions={scheme}"])
        values["data"] |= {part: [{"path": str(args.data / f"{part}.txt")}] for part in ("train", "valid")}
        values["model"]["max_positions"] = values["data"]["context"]
        runs[scheme] = args.runs / scheme
        train(Settings.from_mapping(values), runs[scheme])
    return runs


@torch.no_grad()
def losses(run: Path, text: str, n_times: int) -> Tensor:
    """Nats per position, the mean over rows of `n_times` the trained length, float64."""
    folder, model, tokenizers = open_model(run, task="causal", device="cpu")
    ids = torch.tensor(tokenizers.tgt.encode(text))
    length = n_times * resolved(folder.settings.data.context, "data.context")
    rows = ids[: (len(ids) - 1) // length * length + 1]
    inputs, targets = rows[:-1].view(-1, length), rows[1:].view(-1, length)
    total = torch.zeros(length, dtype=torch.float64)
    for x, y in zip(inputs.split(64), targets.split(64), strict=True):
        nats = F.cross_entropy(model.logits(model(x)).transpose(1, 2), y, reduction="none")
        total += nats.sum(0).double()
    return total / len(inputs)


def measure(runs: dict[str, Path], text: str) -> dict[str, dict[int, Tensor]]:
    """Nats per position by scheme and multiple of the trained length."""
    found: dict[str, dict[int, Tensor]] = {}
    for scheme, run in runs.items():
        found[scheme] = {n: losses(run, text, n) for n in (TIMES if scheme != "learned" else TIMES[:1])}
        print(f"# {scheme}: " + ", ".join(f"{n}x {x.mean():.4f}" for n, x in found[scheme].items()), file=sys.stderr)
    return found


def table(found: dict[str, dict[int, Tensor]]) -> list[str]:
    """Markdown: nats per character, and in brackets those beyond the trained length."""
    lines = heading("positions", *(f"{n}x" for n in TIMES))
    for scheme, by_times in found.items():
        cells = list[str]()
        for n in TIMES:
            nats = by_times.get(n)
            trained = len(by_times[1])
            beyond = f" ({nats[trained:].mean():.3f})" if nats is not None and n > 1 else ""
            cells.append("" if nats is None else f"{nats.mean():.3f}{beyond}")
        lines.append(row(scheme, *cells))
    return lines


def plot(found: dict[str, dict[int, Tensor]], path: Path, *, smooth: int = 8) -> None:
    """Nats over the position in the longest rows, means of `smooth` neighbours."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for scheme, by_times in found.items():
        nats = by_times[max(by_times)]
        if whole := len(nats) // smooth:
            means = nats[: whole * smooth].view(whole, smooth).mean(1)
            axes.plot([smooth * (i + 0.5) for i in range(whole)], means.tolist(), label=scheme)
    trained = len(next(iter(found.values()))[1])
    axes.axvline(trained, color="gray", linestyle=":", label="trained length")
    axes.set(xlabel="position", ylabel="nats per character")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    plt.savefig(path)


def main() -> None:
    """Train, measure, write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.txt and valid.txt")
    parser.add_argument("--runs", type=Path, required=True, help="folder for the run folders")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=SCHEMES)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="other settings of the recipe")
    parser.add_argument("--out", type=Path, help="OUT.md and OUT.svg are written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(train_all(args), (args.data / "valid.txt").read_text(encoding="utf-8"))
    write(table(found), partial(plot, found), args.out)


if __name__ == "__main__":
    main()
