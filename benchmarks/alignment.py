"""Alignment error rate of `transduce align` on text with alignments made by hand, compared with statistical aligners.

    python benchmarks/alignment.py train --data FOLDER --runs RUNS --links gold --src grc --tgt en
    python benchmarks/alignment.py score --data FOLDER --runs RUNS --src grc --tgt en [--statistical DIR]
    python benchmarks/alignment.py cost --data FOLDER --runs RUNS --src grc --tgt en

FOLDER has train, valid and test as .grc, .en and .align (Pharaoh format, the side of --src first). `train` trains both
directions, one after the other; --links is gold (train.align), none, or a file of links for the training text. `score`
prints a row per method. DIR has the links of other aligners for the test text, as NAME.forward and NAME.backward, both
in the direction of --src; `score` also prints the difference of each of our methods to each of them, symmetrized, with
a 95 % interval by bootstrap over the sentences. `cost` translates the test text by turns with an engine that keeps the
weights of the guided head and with one that does not, and prints the ratio of their CPU seconds. benchmarks/README.md
says how these were made.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from unittest import mock

import numpy as np

from transduce.config.decoding import DecodingOptions
from transduce.data.lines import read_lines
from transduce.data.word_links import GoldLinks, WordLink, format_links, parse_links, read_links
from transduce.decoding.translator import Translator
from transduce.decoding.word_alignment import GROW, METHODS, SYMMETRIZATIONS, align_words, head_of, symmetrize
from transduce.evaluation.metrics import score_links
from transduce.runs.folder import RunFolder

RECIPE = """
[data]
src_lang = "{src}"
tgt_lang = "{tgt}"
train = [{{ src = "{data}/train.{src}", tgt = "{data}/train.{tgt}" }}]
valid = [{{ src = "{data}/valid.{src}", tgt = "{data}/valid.{tgt}" }}]

[tokenizer]
kind = "bpe"
vocab_size = 4000

[model]
preset = "tiny"
residual = "pre"
dropout = 0.2

[training]
batch_tokens = 2048
optimizer = "muon"
lr = 0.005
matrix_lr = 0.01
schedule = "linear"
warmup_updates = 100
max_updates = {updates}
valid_updates = {updates}
average = "ema"
ema_decay = 0.99
valid_bleu_sentences = 0
{guided}
"""


def backward(path: Path, out: Path) -> Path:
    """Write the links of a file for the other direction."""
    lines = (parse_links(line).possible for line in read_lines(path))
    out.write_text("".join(f"{format_links(WordLink(j, i) for i, j in links)}\n" for links in lines))
    return out


def train(args: argparse.Namespace) -> None:
    """Train a run for each direction: RUNS/NAME.SRC-TGT."""
    args.runs.mkdir(parents=True, exist_ok=True)
    name = args.links if args.links in ("gold", "none") else Path(args.links).stem
    links = args.data / "train.align" if args.links == "gold" else Path(args.links)
    for src, tgt in ((args.src, args.tgt), (args.tgt, args.src)):
        if args.only and args.only != f"{src}-{tgt}":
            continue
        run, guided = args.runs / f"{name}.{src}-{tgt}", ""
        if args.links != "none":
            path = links if src == args.src else backward(links, args.runs / f"{name}.backward")
            guided = f'guided_alignment = "{path.resolve()}"\nguided_weight = {args.weight}'
        recipe = args.runs / f"{run.name}.toml"
        recipe.write_text(RECIPE.format(src=src, tgt=tgt, data=args.data, updates=args.updates, guided=guided))
        subprocess.run([sys.executable, "-m", "transduce", "train", recipe, "--run", run], check=True)


def row(name: str, found: Sequence[Sequence[WordLink]], gold: Sequence[GoldLinks]) -> None:
    """Print a row of the table."""
    score = score_links(found, gold)
    print(f"| {name} | {score.error_rate:.1%} | {score.precision:.1%} | {score.recall:.1%} |", flush=True)


def rows(
    name: str, sides: tuple[str, str], found: Sequence[list[list[WordLink]]], gold: Sequence[GoldLinks]
) -> list[list[WordLink]]:
    """Print the rows of a method: each direction, then both together. All links are in the first direction.

    Returns the links by grow-diag-final-and.
    """
    row(f"{name}, {'-'.join(sides)}", found[0], gold)
    row(f"{name}, {'-'.join(reversed(sides))}", found[1], gold)
    flipped = [[WordLink(j, i) for i, j in links] for links in found[1]]
    both = {how: [symmetrize(*one, how) for one in zip(found[0], flipped, strict=True)] for how in SYMMETRIZATIONS}
    for how, links in both.items():
        row(f"{name}, {how}", links, gold)
    return both[GROW]


def difference(
    found: Sequence[list[WordLink]], other: Sequence[list[WordLink]], gold: Sequence[GoldLinks]
) -> tuple[float, float, float]:
    """The difference of two error rates, and its 95 % interval by a paired bootstrap over the sentences."""
    n, draw = len(gold), np.random.default_rng(1)
    drawn = np.vstack([np.ones(n, int), draw.multinomial(n, np.full(n, 1 / n), 10_000)])  # the first: each once

    def rates(links: Sequence[list[WordLink]]) -> np.ndarray:
        counts = np.array([astuple(score_links([one], [known])) for one, known in zip(links, gold, strict=True)])
        sure, n_found, found_sure, found_possible = (drawn @ counts).T
        return 1 - (found_sure + found_possible) / (sure + n_found)

    differences = rates(found) - rates(other)
    low, high = np.quantile(differences[1:], (0.025, 0.975))
    return differences[0], low, high


def score(args: argparse.Namespace) -> None:
    """Print the scores of all methods on the set `--set`, in each direction and symmetrized."""
    texts = {side: list(read_lines(args.data / f"{args.set}.{side}")) for side in (args.src, args.tgt)}
    gold = read_links(args.data / f"{args.set}.align", texts[args.src], texts[args.tgt])
    print("| method | AER | precision | recall |\n|---|---|---|---|")
    others, ours = dict[str, list[list[WordLink]]](), dict[str, list[list[WordLink]]]()
    for path in sorted(args.statistical.glob("*.forward")) if args.statistical else ():
        sides = [
            [list(parse_links(line).sure) for line in read_lines(path.with_suffix(s))]
            for s in (".forward", ".backward")
        ]
        others[path.stem] = rows(path.stem, (args.src, args.tgt), sides, gold)
    names = sorted({path.name.split(".")[0] for path in args.runs.glob(f"*.{args.src}-{args.tgt}")})
    for name, method in itertools.product(names, METHODS):
        if (method == "guided") == (name == "none"):
            continue
        found = []
        for src, tgt in ((args.src, args.tgt), (args.tgt, args.src)):
            run = args.runs / f"{name}.{src}-{tgt}"
            head = head_of(RunFolder.open(run).settings, method)
            found.append(list(align_words(Translator.load(run, device="cpu"), texts[src], texts[tgt], head)))
        label = method + (f" ({name} links)" if method == "guided" else "")
        found[1] = [[WordLink(i, j) for j, i in links] for links in found[1]]
        ours[label] = rows(label, (args.src, args.tgt), found, gold)
    for (label, links), (name, known) in itertools.product(ours.items(), others.items()):
        found_difference, low, high = difference(links, known, gold)
        print(f"{label} - {name}: {found_difference:+.1%}, 95 % interval {low:+.1%} to {high:+.1%}")


def cost(args: argparse.Namespace) -> None:
    """Print what guided alignment costs while the native library translates."""
    run = args.runs / f"gold.{args.src}-{args.tgt}"
    keeps = Translator.load(run, device="cpu")
    with mock.patch("transduce.decoding.open_run.guided_head", return_value=None):
        plain = Translator.load(run, device="cpu")
    lines = list(read_lines(args.data / f"{args.set}.{args.src}"))
    for beam in (1, 5):
        ratios = []
        for i in range(31):
            seconds = {}
            for one in (keeps, plain)[:: 1 if i % 2 else -1]:
                start = time.process_time()
                one.translate(lines, DecodingOptions(beam=beam))
                seconds[one] = time.process_time() - start
            ratios.append(seconds[keeps] / seconds[plain])
        low, median, high = statistics.quantiles(ratios, n=4)
        print(
            f"beam {beam}: {seconds[plain]:.2f} CPU s; with links {median:.3f} times that "
            f"(quartiles {low:.3f}, {high:.3f})"
        )


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("train", "score", "cost"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--src", required=True)
    parser.add_argument("--tgt", required=True)
    parser.add_argument("--links", default="gold", help="gold, none or a file")
    parser.add_argument("--only", default="", help="train this direction only, such as grc-en")
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--weight", type=float, default=1.0, help="training.guided_weight")
    parser.add_argument("--statistical", type=Path, default=None, help="folder with links of other aligners")
    parser.add_argument("--set", default="test")
    args = parser.parse_args()
    {"train": train, "score": score, "cost": cost}[args.do](args)


if __name__ == "__main__":
    main()
