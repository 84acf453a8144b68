"""Measure the preparation of a corpus (read, clean, learn a vocabulary, encode): time, memory, disk and bytes read.

    python benchmarks/preparation.py --pairs 2000000 --folder corpus --cores 1
    python benchmarks/preparation.py --pairs 2000000 --folder corpus --cores 2 --workers 4

Writes a synthetic corpus into the folder (kept for the next call) and runs `transduce prepare` on it. The digest of the
store shows whether two runs have prepared the same. Memory is that of all processes together; shared pages count once.
Linux only: the figures come from /proc.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import resource
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


def number_in(file: Path, field: str) -> int:
    """A number from a file of /proc; 0 once the process has ended."""
    try:
        found = re.search(rf"^{field}:\s*(\d+)", file.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def processes_of(session: int) -> list[Path]:
    """The folders in /proc of the processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                found.append(folder)
        except OSError:
            continue
    return found


def bytes_on_disk(run: Path) -> int:
    """Bytes of the run folder."""
    total = 0
    for path in run.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def measure(command: list[str], run: Path) -> dict[str, float]:
    """Run the preparation in a separate process."""
    began = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def show() -> None:
        for line in process.stderr or ():
            print(f"  {time.monotonic() - began:7.1f} s  {line.rstrip()[:150]}", file=sys.stderr)

    threading.Thread(target=show, daemon=True).start()
    memory = disk = read = 0
    while process.poll() is None:
        found = processes_of(process.pid)
        memory = max(memory, sum(number_in(one / "smaps_rollup", "Pss") for one in found) * 1024)
        disk, read = max(disk, bytes_on_disk(run)), max(read, number_in(Path(f"/proc/{process.pid}/io"), "rchar"))
        time.sleep(0.5)
    seconds, used = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        sys.exit("the preparation failed")
    return {
        "seconds": seconds,
        "CPU seconds": used.ru_utime + used.ru_stime,
        "peak memory, MB": memory / 1e6,
        "peak disk, MB": disk / 1e6,
        "kept on disk, MB": bytes_on_disk(run) / 1e6,
        "read by the main process, MB": read / 1e6,
    }


def main() -> None:
    """Write the corpus, measure, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where the corpus is kept (default: a temporary folder)")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="cores that may be used")
    parser.add_argument("--workers", type=int, default=0, help="data.workers")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    os.sched_setaffinity(0, range(args.cores))
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        files = write_corpus(folder, args.pairs)
        run = folder / f"run-{os.getpid()}"
        command = [sys.executable, "-m", "transduce", "prepare", "--run", run, "--src", files[0], "--tgt", files[1]]
        for value in (*SETTINGS, f"data.workers={args.workers}", *args.set):
            command += ["--set", value]
        try:
            found = measure(list(map(str, command)), run)
            digest = hashlib.sha256((run / "tokens" / "manifest.json").read_bytes()).hexdigest()[:16]
        finally:
            shutil.rmtree(run, ignore_errors=True)
    size = sum(path.stat().st_size for path in files) / 1e6
    print(f"{args.pairs:,} pairs, {size:,.0f} MB of text, {args.cores} cores, store {digest}")
    for name, value in found.items():
        print(f"| {name} | {value:,.1f} |")


if __name__ == "__main__":
    main()
