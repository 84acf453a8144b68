"""Run commands on damaged files of every kind and print a table of the outcomes.

    python benchmarks/fuzz.py --count 10000 --seed 1
    python benchmarks/fuzz.py --seed 1 --only 4711        # one case again, with its output

Run folders, checkpoints, encoded text, vocabularies, weights, records, imported folders, pickles, recipes and texts are
damaged at random (`tests/fuzz`), most of the time with updated checksums, so that the damage reaches the parser. Good
outcomes are `loaded`, `refused` (one line that names the file, exit code 2) and `failed` (the same, exit code 1).
Everything else is reported and makes the exit code 1: a traceback, a crash, a hang, an error that names no file, too
much memory, damage that a checksum should have found (SILENT), anything written, run or opened outside the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
GOOD = ("loaded", "refused", "failed")
START = 300.0  # seconds to create the originals


class Worker:
    """A process that runs cases; restarted after a crash or a hang."""

    def __init__(self, folder: Path, seed: str, *, quick: bool, limit: float) -> None:
        self.arguments = [str(folder / "originals"), str(folder / f"scratch{os.getpid()}"), seed, str(int(quick))]
        self.limit = limit
        self._process: Any = None

    def _start(self) -> Any:
        source = [str(TESTS), str(TESTS.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(source),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, "-m", "fuzz.worker", *self.arguments]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        os.set_blocking(process.stderr.fileno(), False)
        self._process, self._rest = process, b""
        if self._line(START) is None:
            raise SystemExit(f"the worker does not start: {self._errors()}")
        return process

    def _line(self, seconds: float) -> dict[str, Any] | None:
        """The next line; None if the process exits or the time is over."""
        end = time.monotonic() + seconds
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready or not (more := os.read(self._process.stdout.fileno(), 1 << 16)):
                return None
            self._rest += more
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def _errors(self) -> str:
        try:
            return (self._process.stderr.read() or b"").decode("utf-8", "replace")[-1500:]
        except OSError:
            return ""

    def run(self, number: int) -> dict[str, Any]:
        """Run one case."""
        process = self._process or self._start()
        process.stdin.write(f"{number}\n".encode())
        process.stdin.flush()
        found: dict[str, Any] = {"kind": "?", "file": "?", "damage": "?", "seconds": 0.0}
        for seconds in (self.limit * 2, self.limit):
            line = self._line(seconds)
            if line is None:
                found |= self._crash_or_hang()
                return found
            found |= line
        self._errors()  # a full pipe would block the worker
        return found

    def _crash_or_hang(self) -> dict[str, Any]:
        hung = self._process.poll() is None
        if hung:
            try:
                self._process.wait(2)
                hung = False
            except subprocess.TimeoutExpired:
                self._process.kill()
        code, errors = self._process.wait(), self._errors()
        self._process = None
        return {"outcome": "HANG" if hung else "CRASH", "output": f"{'' if hung else code} {errors[-400:]}"}

    def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()


def main() -> None:
    """Run the cases; print the bad ones and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--only", type=int, nargs="+", help="run only these cases and print their output")
    parser.add_argument("--quick", action="store_true", help="only the kinds of files in the short test")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per case")
    parser.add_argument("--folder", type=Path, help="keep the originals in this folder")
    parser.add_argument("--results", type=Path, help="write the outcome of each case to this file (JSON lines)")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="fuzz-"))
    worker = Worker(folder.resolve(), args.seed, quick=args.quick, limit=args.limit)
    numbers = args.only if args.only is not None else range(args.first, args.first + args.count)
    table: dict[str, Counter[str]] = {}
    bad, slowest = 0, 0.0
    began = time.monotonic()
    for number in numbers:
        found = worker.run(number)
        table.setdefault(found["kind"], Counter())[found["outcome"]] += 1
        slowest = max(slowest, found["seconds"])
        if found["outcome"] not in GOOD or args.only is not None:
            bad += found["outcome"] not in GOOD
            print(
                f"{number}: {found['outcome']}: {found['kind']}, {found['file']}, {found['damage']}: {found['output']}",
                flush=True,
            )
        if args.results:
            with args.results.open("a") as file:
                file.write(json.dumps({"number": number, **found}) + "\n")
    worker.close()
    columns = [*GOOD, *sorted({name for row in table.values() for name in row} - {*GOOD})]
    print(f"\n| {'kind of file'} | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for kind in sorted(table):
        print(f"| {kind} | {' | '.join(str(table[kind][name] or '') for name in columns)} |")
    total = sum((row for row in table.values()), Counter())
    print(f"| all | {' | '.join(str(total[name] or '') for name in columns)} |")
    print(
        f"\n{sum(total.values()):,} cases in {time.monotonic() - began:,.0f} s, the slowest {slowest:.1f} s; bad: {bad}"
    )
    if args.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
