"""Memory over time: sample the resident size of a long training and a long translation, and check that it stays flat.

    python benchmarks/memory.py                      # 20,000 small updates, then 100,000 translated lines
    python benchmarks/memory.py --updates 2000 --lines 10000 --set training.valid_updates=100

The commands run in separate processes, whose resident size is read twice per second. The first quarter of the work is
warm-up. After it, memory may grow by at most 2 % (or 8 MiB, if that is more): both the line fitted through the samples,
and the mean of the last quarter compared with the second. Exit code 1 if it grows more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

SMALL = (
    "model.d_model=32",
    "model.d_ff=64",
    "model.n_heads=2",
    "model.n_encoder_layers=1",
    "model.n_decoder_layers=1",
    "tokenizer.vocab_size=400",
    "training.batch_tokens=192",
    "training.precision=float32",
    "training.valid_updates=500",
    "training.valid_bleu_sentences=20",
    "decoding.max_length=24",
)
SHARE, BYTES = 0.02, 8 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds since the start, resident bytes, and progress (updates or lines)."""

    seconds: float
    resident: int
    done: int


def resident(pid: int) -> int:
    """Resident bytes of a process; 0 after it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def watch(command: list[str], done: Callable[[], int]) -> list[Sample]:
    """Run a command and sample its memory from the first sign of progress."""
    began, samples = time.monotonic(), list[Sample]()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stderr=errors)
        while process.poll() is None:
            time.sleep(0.5)
            bytes_, n = resident(process.pid), done()
            if bytes_ and n:
                samples.append(Sample(time.monotonic() - began, bytes_, n))
        if process.returncode:
            errors.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{errors.read().decode()[-2000:]}")
    return samples


def slope(samples: list[Sample]) -> float:
    """Bytes per unit of work, by least squares."""
    n = len(samples)
    x, y = sum(s.done for s in samples) / n, sum(s.resident for s in samples) / n
    spread = sum((s.done - x) ** 2 for s in samples)
    return sum((s.done - x) * (s.resident - y) for s in samples) / spread if spread else 0.0


def judge(name: str, samples: list[Sample]) -> tuple[str, bool]:
    """A row of the table, and whether memory stayed flat."""
    total = samples[-1].done
    warm = [s for s in samples if s.done >= total / 4]
    second = [s.resident for s in warm if s.done < total / 2]
    last = [s.resident for s in warm if s.done >= total * 3 / 4]
    if len(warm) < 20 or not second or not last:
        sys.exit(f"{name}: too few samples ({len(samples)}); give it more work")
    rise = slope(warm) * (warm[-1].done - warm[0].done)
    growth = sum(last) / len(last) - sum(second) / len(second)
    bound = max(BYTES, SHARE * sum(second) / len(second))
    flat = max(rise, growth) <= bound
    mib = 1 << 20
    numbers = (
        min(s.resident for s in samples),
        sum(second) / len(second),
        sum(last) / len(last),
        max(s.resident for s in samples),
    )
    cells = " | ".join(f"{number / mib:,.0f}" for number in numbers)
    verdict = "flat" if flat else "GROWS"
    head = f"| {name} | {total:,} | {samples[-1].seconds:,.0f}"
    return f"{head} | {cells} | {rise / mib:+.1f} | {growth / mib:+.1f} | {verdict} |", flat


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "transduce", *map(str, arguments)]


def last_update(metrics: Path) -> int:
    """The update in the last complete line."""
    try:
        lines = metrics.read_bytes().splitlines()
    except OSError:
        return 0
    for line in reversed(lines[-3:]):
        try:
            return int(json.loads(line).get("update", 0))
        except ValueError:
            continue
    return 0


def size_of(folder: Path) -> int:
    """Size in bytes of the temporary files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def main() -> None:
    """Train, translate, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=20_000)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--pairs", type=int, default=10_000, help="of the built-in corpus")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--samples", type=Path, help="keep all samples in this file (JSON lines)")
    args = parser.parse_args()
    rows, good = [], True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run, text, out = folder / "run", folder / "in.txt", folder / "out"
        values = (*SMALL, f"data.demo={args.pairs}", f"training.max_updates={args.updates}", *args.set)
        recipe = folder / "memory.toml"
        recipe.write_text(f"[data]\ndemo = {args.pairs}\n")
        sets = [part for value in values for part in ("--set", value)]
        train = watch(
            command("train", recipe, "--run", run, "--quiet", *sets), lambda: last_update(run / "metrics.jsonl")
        )
        found = [("train, updates", train)]
        if args.lines:
            from transduce.demo.corpus import demo_pairs

            lines = [f"{pair.src}\n" for pair in demo_pairs("test", 5_000, seed=2)]
            text.write_text("".join(lines[i % len(lines)] for i in range(args.lines)), encoding="utf-8")
            out.mkdir()
            # Lines are written in the order of the text, so the bytes written measure the progress.
            translate = watch(command("translate", run, text, "-o", out / "text"), lambda: size_of(out))
            n_bytes = max(sample.done for sample in translate)
            scaled = [replace(sample, done=round(sample.done * args.lines / n_bytes)) for sample in translate]
            found.append(("translate, lines", scaled))
        for what, samples in found:
            row, flat = judge(what, samples)
            rows.append(row)
            good &= flat
            if args.samples:
                with args.samples.open("a") as file:
                    file.writelines(json.dumps([what, s.seconds, s.resident, s.done]) + "\n" for s in samples)
    print("| work | amount | seconds | first MiB | second quarter | last quarter | most | line rises | growth | |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
