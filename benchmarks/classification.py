"""Accuracy of classifiers on small sets of labelled texts, with default settings and other presets.

    python benchmarks/classification.py --data FOLDER --presets default bert-tiny --seeds 1 2

FOLDER contains `tatoeba_en-de/train.en` and `.de`, `sst2_glue/train.tsv` and `valid.tsv`, and `tinyshakespeare`. Sets:

wh       which question word begins a question; 4,448 texts, 6 labels
sst      sentiment of phrases, tested on sentences; 5,500 or 2,000 texts, 2 labels
speak    the speaker of two lines of Shakespeare; 1,631 texts, 6 labels
pron     which English word begins the translation of a German sentence; 5,500 texts, 8 labels
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

Rows = list[tuple[str, str]]
FIRST_WORDS = ("i", "you", "he", "she", "we", "they", "tom", "the")


def make_sets(data: Path, draw: random.Random) -> dict[str, tuple[Rows, Rows]]:
    """Training and test rows (label, text) of each set."""
    rows = _labelled(data / "sst2_glue" / "train.tsv")
    draw.shuffle(rows)
    tested = _labelled(data / "sst2_glue" / "valid.tsv")
    sets = {f"sst{n}": (rows[:n], tested) for n in (5500, 2000)}
    english, german = ((data / "tatoeba_en-de" / f"train.{side}").read_text().splitlines() for side in ("en", "de"))
    rows = _questions(english, draw)
    sets["wh"] = rows[1000:], rows[:1000]
    rows = _speakers("".join(path.read_text() for path in sorted((data / "tinyshakespeare").glob("*.txt"))), draw)
    sets["speak"] = rows[500:], rows[:500]
    rows = _first_words(zip(english, german, strict=True), draw)
    sets["pron"] = rows[1000:6500], rows[:1000]
    return sets


def _labelled(path: Path) -> Rows:
    return [(label, text) for label, _, text in (line.partition("\t") for line in path.read_text().splitlines())]


def _questions(lines: Iterable[str], draw: random.Random) -> Rows:
    found: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        if match := re.match(r"(What|Who|Where|When|How|Why)\b(.*\?)$", line.strip()):
            is_short = match[2].startswith("'s ")  # what's, who's
            found[match[1].lower()].add(match[2].strip().replace("'s ", "is ") if is_short else match[2].strip())
    rows = [
        (word, text)
        for word, texts in sorted(found.items())
        for text in draw.sample(sorted(texts), min(len(texts), 1200))
        if text
    ]
    draw.shuffle(rows)
    return rows


def _speakers(text: str, draw: random.Random) -> Rows:
    found: dict[str, list[str]] = defaultdict(list)
    for block in text.split("\n\n"):
        name, *lines = block.strip().split("\n")
        if lines and name.endswith(":"):
            pairs = (" ".join(lines[i : i + 2]) for i in range(0, len(lines), 2))
            found[name[:-1]] += [pair for pair in pairs if len(pair.split()) >= 8]
    top = sorted(found, key=lambda name: -len(found[name]))[:6]
    rows = [(name, line) for name in top for line in dict.fromkeys(found[name])]
    draw.shuffle(rows)
    return rows


def _first_words(pairs: Iterable[tuple[str, str]], draw: random.Random) -> Rows:
    firsts = ((english.split()[0].lower().strip(".,'"), german) for english, german in pairs if english.split())
    rows = [(word, german.strip()) for word, german in firsts if word in FIRST_WORDS]
    draw.shuffle(rows)
    found: dict[str, Rows] = defaultdict(list)
    for word, german in rows:
        if len(found[word]) < 1000:
            found[word].append((word, german))
    rows = [row for some in found.values() for row in some]
    draw.shuffle(rows)
    return rows


def train(folder: Path, rows: tuple[Rows, Rows], preset: str, seed: int) -> tuple[float, float]:
    """Test accuracy and seconds of one training."""
    for name, part in zip(("train", "test"), rows, strict=True):
        (folder / f"{name}.tsv").write_text("".join(f"{label}\t{text}\n" for label, text in part))
    recipe = 'task = "classification"\n[data]\ntrain = [{ path = "train.tsv" }]\ntest = [{ path = "test.tsv" }]\n'
    (folder / "recipe.toml").write_text(recipe)
    values = [f"training.seed={seed}", "training.precision=float32"]
    values += [] if preset == "default" else [f"model.preset={preset}"]
    command = [sys.executable, "-m", "transduce", "train", str(folder / "recipe.toml"), "--run", str(folder / "run")]
    began = time.monotonic()
    subprocess.run([*command, "--quiet", *(part for value in values for part in ("--set", value))], check=True)
    sets = json.loads((folder / "run" / "label_scores.json").read_text())["sets"]
    return next(one["accuracy"] for one in sets if one["name"] != "valid"), time.monotonic() - began


def main() -> None:
    """Train on all sets and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="*", default=["wh", "sst5500", "sst2000", "speak", "pron"])
    parser.add_argument("--presets", nargs="*", default=["default", "bert-tiny"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2])
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sets = make_sets(args.data, random.Random(0))
    print("| set | training texts | preset | test accuracy, % | seconds |\n|---|---|---|---|---|")
    for name in args.sets:
        for preset in args.presets:
            scores, seconds = "", ""
            for seed in args.seeds:
                with tempfile.TemporaryDirectory() as folder:
                    score, took = train(Path(folder), sets[name], preset, seed)
                scores, seconds = f"{scores} {100 * score:.1f}", f"{seconds} {took:.0f}"
            print(f"| {name} | {len(sets[name][0]):,} | {preset} |{scores} |{seconds} |", flush=True)


if __name__ == "__main__":
    main()
