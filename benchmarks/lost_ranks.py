"""Kill random processes of one training, which must recover automatically and end with the same bits (Linux).

    python benchmarks/lost_ranks.py --processes 4 --kills 50 [--parallel shard]

Runs `transduce train --processes N --max-restarts KILLS` on the built-in corpus once without kills, then with SIGKILL
to a random process at a random time after every start. Compares the weights and all losses.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMES = {"model.d_model": 32, "model.d_ff": 64, "model.n_heads": 2, "model.n_encoder_layers": 1,
    "model.n_decoder_layers": 1, "tokenizer.vocab_size": 300, "training.batch_tokens": 256,
    "training.precision": "float32", "training.valid_bleu_sentences": 4, "decoding.max_length": 12,
    "data.demo": 400}  # fmt: skip


def start(run: Path, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start the training."""
    limits = {"max_updates": args.updates, "valid_updates": args.updates // 4, "save_updates": 10}
    limits["parallel"] = args.parallel
    values = NAMES | {f"training.{name}": value for name, value in limits.items()}
    given = [part for name, value in values.items() for part in ("--set", f"{name}={value}")]
    given += [part for value in args.set for part in ("--set", value)]
    command = [sys.executable, "-m", "transduce", "train", "--run", str(run), *given]
    command += ["--processes", str(args.processes), "--max-restarts", str(args.kills)]
    with run.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def ranks_of(launcher: int) -> dict[int, int]:
    """Process ids of the ranks that run now."""
    found = {}
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has just exited
            continue
        found |= {int(one[5:]): int(pid) for one in variables if one.startswith(b"RANK=")}
    return found


def kill_ranks(training: subprocess.Popen[bytes], args: argparse.Namespace) -> int:
    """Kill random ranks of a training, each some seconds after all have started; returns the number of kills."""
    draw, killed = random.Random(args.seed), 0
    earlier: set[int] = set()
    while killed < args.kills and training.poll() is None:
        ranks = ranks_of(training.pid)
        if len(ranks) < args.processes or earlier & {*ranks.values()}:
            time.sleep(0.01)
            continue
        time.sleep(draw.uniform(0, args.seconds))
        rank = draw.choice(sorted(ranks))
        try:
            os.kill(ranks[rank], signal.SIGKILL)
        except ProcessLookupError:  # the training is at its end
            break
        earlier, killed = {*ranks.values()}, killed + 1
        print(f"# {killed}: rank {rank}", file=sys.stderr, flush=True)
    return killed


def losses(run: Path) -> list[tuple[str, int, float]]:
    """The losses of updates and validations in the log."""
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(e["event"], e["update"], e["loss"]) for e in events if e["event"] in ("update", "validation")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--parallel", default="replicate", choices=("replicate", "shard"))
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=8.0, help="the longest time from a start to a kill")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="a setting of both trainings")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole, cut = Path(folder, "whole"), Path(folder, "cut")
        if start(whole, args).wait():
            sys.exit(whole.with_suffix(".log").read_text())
        began, training = time.monotonic(), start(cut, args)
        killed = kill_ranks(training, args)
        code = training.wait()
        log = cut.with_suffix(".log").read_text()
        restarts = log.count("all start again")
        print(f"{killed} kills, {restarts} restarts, {time.monotonic() - began:.0f} s, exit code {code}")
        if code:
            sys.exit(log[-3000:])
        same = (whole / "model.safetensors").read_bytes() == (cut / "model.safetensors").read_bytes()
        print("the same weights and losses" if same and losses(whole) == losses(cut) else "DIFFERENT")


if __name__ == "__main__":
    main()
