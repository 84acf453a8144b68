"""Measure the preparation of a corpus (read, clean, learn a vocabulary, encode): time, memory, disk and bytes read.

    python benchmarks/preparation.py --pairs 5000000 --folder /tmp/corpus
    python benchmarks/preparation.py --pairs 5000000 --folder /tmp/corpus --python /path/to/other/python

Writes a synthetic corpus into the folder (kept for the next call), starts `transduce train` on it, and kills it as soon
as the encoded text is complete. `--python` measures another installed version. Linux only: the figures come from /proc.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

SETTINGS = (
    "tokenizer.vocab_size=4000",
    "data.deduplicate=true",
    "model.preset=tiny",
    "training.max_updates=1",
    "training.batch_tokens=1024",
    "training.precision=float32",
)


def write_corpus(folder: Path, n_pairs: int, *, seed: int = 1, n_words: int = 50_000) -> tuple[Path, Path]:
    """Write `n_pairs` lines of words with a Zipf distribution for each side; about 3 % of the pairs are repeated."""
    paths = folder / f"{n_pairs}.src", folder / f"{n_pairs}.tgt"
    if all(path.exists() for path in paths):
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(draw.choice(letters, n)) for n in draw.integers(2, 10, n_words)]
    chances = 1 / np.arange(10, n_words + 10)
    chances /= chances.sum()
    with paths[0].open("w") as src, paths[1].open("w") as tgt:
        for begin in range(0, n_pairs, 10_000):
            n = min(10_000, n_pairs - begin)
            for file in (src, tgt):
                lengths = draw.integers(5, 16, n)
                drawn = iter(draw.choice(n_words, int(lengths.sum()), p=chances).tolist())
                lines = [" ".join(words[next(drawn)] for _ in range(length)) + "\n" for length in lengths]
                repeated = len(lines) * 97 // 100
                file.writelines(lines[:repeated] + lines[: n - repeated])
    return paths


def proc(pid: int, file: str, field: str) -> int:
    """A number from /proc/PID; 0 once the process has ended."""
    try:
        found = re.search(rf"^{field}:\s*(\d+)", Path(f"/proc/{pid}/{file}").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def cpu_seconds(pid: int) -> float:
    """User and system time."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bytes_on_disk(pid: int, run: Path) -> int:
    """Bytes of the run folder, and of unnamed temporary files that the process has open."""
    total = 0
    for path in run.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(link)
            if target.endswith("(deleted)") and not target.startswith(("/dev/", "/memfd:")):
                total += link.stat().st_size
    except OSError:
        pass
    return total


def measure(python: str, files: tuple[Path, Path], run: Path, settings: list[str]) -> dict[str, float]:
    """Run the preparation in a separate process."""
    sets = [part for value in settings for part in ("--set", value)]
    command = [python, "-m", "transduce", "train", "--src", files[0], "--tgt", files[1], "--run", run, *sets]
    began = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def show() -> None:
        for line in process.stderr or ():
            print(f"  {time.monotonic() - began:7.1f} s  {line.rstrip()[:150]}", file=sys.stderr)

    threading.Thread(target=show, daemon=True).start()
    found = {"seconds": 0.0, "CPU seconds": 0.0, "peak memory, MB": 0.0, "peak disk, MB": 0.0, "read, MB": 0.0}
    while process.poll() is None and not (run / "data.json").exists():
        found["peak disk, MB"] = max(found["peak disk, MB"], bytes_on_disk(process.pid, run) / 1e6)
        found["CPU seconds"] = cpu_seconds(process.pid)
        found["peak memory, MB"] = proc(process.pid, "status", "VmHWM") * 1024 / 1e6
        found["read, MB"] = proc(process.pid, "io", "rchar") / 1e6
        time.sleep(0.2)
    found["seconds"] = time.monotonic() - began
    process.kill()
    process.wait()
    if not (run / "data.json").exists():
        sys.exit("the preparation failed")
    found["kept on disk, MB"] = sum(path.stat().st_size for path in run.rglob("*") if path.is_file()) / 1e6
    return found


def main() -> None:
    """Write the corpus, measure, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where the corpus is kept (default: a temporary folder)")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the version to measure")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        files = write_corpus(folder, args.pairs)
        size = sum(path.stat().st_size for path in files) / 1e6
        run = folder / f"run-{os.getpid()}"
        try:
            found = measure(args.python, files, run, [*SETTINGS, *args.set])
        finally:
            shutil.rmtree(run, ignore_errors=True)
    found["read, times the text"] = found["read, MB"] / size
    print(f"{args.pairs:,} pairs, {size:,.0f} MB of text")
    for name, value in found.items():
        print(f"| {name} | {value:,.1f} |")


if __name__ == "__main__":
    main()
