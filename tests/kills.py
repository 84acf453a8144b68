"""Kills real trainings at random instants, and holds what becomes of them against one that was left alone.

    python tests/kills.py --kills 200

Every process runs `transduce train` as a user would, from the text to the report. What kills it stands outside and
watches the folder: uniformly at random; while a file is being written aside (a `.aside` name is there); while the text
is being prepared; around a validation and the end of an epoch; and with the disk full, where the folder lies on a small
one (a tmpfs, which takes root to mount). A process starts from a server that has PyTorch imported, in a hundredth of
the time; every tenth is the command of a shell.

Checked after every kill: the next start succeeds, and goes on from a checkpoint at most one save interval back. Checked
at every end: log and weights are those of the run that was left alone, bit for bit, no line is there twice or missing,
and the log tells of the restarts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
UPDATES, VALID, SAVE = 120, 30, 10
FREE_ON_DISK = 24 << 20  # bytes of the small disk
SETTINGS = {
    "model.d_model": 16, "model.d_ff": 32, "model.n_heads": 2, "model.n_encoder_layers": 1, "model.n_decoder_layers": 1,
    "tokenizer.vocab_size": 120, "tokenizer.normalization": "identity", "tokenizer.sampling": 0.1,
    "training.batch_tokens": 256, "training.precision": "float32", "training.device": "cpu", "training.lr": 0.01,
    "training.max_updates": UPDATES, "training.valid_updates": VALID, "training.save_updates": SAVE,
    "training.valid_bleu_sentences": 4, "decoding.max_length": 12, "training.average": "best", "training.average_n": 2,
}  # fmt: skip
WAYS = ("any time", "writing", "preparing", "validating", "disk full")


@dataclass
class Tally:
    """What was done and seen."""

    kills: Counter[str] = field(default_factory=Counter)
    ends: int = 0
    lost: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def lines(self) -> list[str]:
        by_way = ", ".join(f"{way}: {n}" for way, n in self.kills.items())
        return [
            f"{sum(self.kills.values())} kills ({by_way}), {self.ends} ends of trainings, {self.seconds:.0f} seconds",
            f"updates lost by a kill: {max(self.lost, default=0)} at most, in the mean "
            f"{sum(self.lost) / max(1, len(self.lost)):.1f}, of {SAVE} between two savings",
            *(
                self.faults
                or ["every restart succeeded; every end equals that of the training left alone, bit for bit"]
            ),
        ]


def command_of(folder: Path, run: str) -> list[str]:
    sets = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    texts = ["--src", str(folder / "train.en"), "--tgt", str(folder / "train.de")]
    return ["train", *texts, "--run", str(folder / run), "--quiet", *sets]


def child(arguments: list[str], errors: str) -> None:
    """What a process of the server does."""
    with open(errors, "a") as file:
        os.dup2(file.fileno(), 2)
    import torch

    torch.set_num_threads(1)
    from transduce.__main__ import main

    main(arguments)


class Processes:
    """Starts trainings, the most from a server, some from a shell's command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        os.environ["PYTHONPATH"] = str(HERE.parent / "src")  # this tree's code, in all processes
        self.context = multiprocessing.get_context("forkserver")
        # The last two: a training imports them at its end only, and not in a hundredth of the time.
        names = ["torch", "torch._dynamo", "sentencepiece", "sacrebleu", "transduce.pipeline", "transduce.__main__"]
        self.context.set_forkserver_preload(names)

    def start(self, run: str, *, shell: bool = False) -> subprocess.Popen[bytes] | Any:
        arguments, errors = command_of(self.folder, run), str(self.folder / f"{run}.err")
        if shell:
            with open(errors, "ab") as file:
                return subprocess.Popen([sys.executable, "-m", "transduce", *arguments], stderr=file)
        process = self.context.Process(target=child, args=(arguments, errors))
        process.start()
        return process


def ended(process: Any, timeout: float | None = None) -> int | None:
    """The exit code, or None where it has not come within `timeout`."""
    if isinstance(process, subprocess.Popen):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout)
        return None
    process.join(timeout)
    return process.exitcode


def events(run: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError):
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n")[:-1]]
    return []


def last_update(run: Path) -> int:
    return max((e["update"] for e in events(run) if e["event"] != "restart"), default=0)


def computed(run: Path) -> list[dict[str, Any]]:
    left_out = ("seconds", "tokens_per_second", "validation_seconds", "minutes")
    told = [e for e in events(run) if e["event"] != "restart"]
    return [{k: v for k, v in e.items() if k not in left_out} for e in told]


def wait_for(way: str, run: Path, process: Any, draw: random.Random, seconds: float) -> None:
    """Come back at an instant of this kind, or when the process has ended, or after a while."""
    until = time.monotonic() + 3 * seconds
    if way in ("any time", "disk full"):
        ended(process, draw.uniform(0.0, seconds))
        return
    here = last_update(run)
    mark = here + VALID if way == "validating" else here + draw.randint(0, 40)
    while time.monotonic() < until and ended(process, 0) is None:
        if way == "writing" and last_update(run) >= min(mark, UPDATES):
            folders = [run, run / "checkpoints", run / "averaging", run / "tokens"]
            names = [n for f in folders if f.is_dir() for n in _listed(f)]
            if any(name.endswith(".aside") for name in names):
                break
        elif way == "preparing" and (run.exists() and not (run / "metrics.jsonl").exists()):
            ended(process, draw.uniform(0.0, 0.3 * seconds))
            return
        elif way == "preparing" and (run / "metrics.jsonl").exists():
            break  # prepared long ago: some other instant
        elif way == "validating" and last_update(run) >= min(mark // VALID * VALID, UPDATES):
            break
        time.sleep(0.0005)
    time.sleep(draw.uniform(0.0, 0.004))


def _listed(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


@contextlib.contextmanager
def small_disk(folder: Path, n_bytes: int) -> Iterator[bool]:
    """Mount a small disk there; whether it was possible."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={n_bytes}", "tmpfs", str(folder)]
    there = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield there
    finally:
        if there:
            subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def full(folder: Path, room: int) -> Iterator[None]:
    """Fill the disk of `folder` but for `room` bytes."""
    filler = folder / "filler"
    try:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            free = shutil.disk_usage(folder).free
            for _ in range(max(0, free - room) >> 12):
                file.write(b"\0" * 4096)
        yield
    finally:
        filler.unlink(missing_ok=True)


def kill(process: Any) -> bool:
    """SIGKILL; whether the process was still there."""
    if ended(process, 0) is not None:
        return False
    os.kill(process.pid, signal.SIGKILL)
    ended(process)
    return True


def one_kill(
    processes: Processes, run: str, way: str, draw: random.Random, tally: Tally, *, seconds: float, shell: bool
) -> None:
    """Start, or go on with, a training and kill it; or fill the disk under it, and let it fail or kill it."""
    path = processes.folder / run
    before = _checkpointed(path)
    n_restarts = sum(e["event"] == "restart" for e in events(path))
    process = processes.start(run, shell=shell)
    if way == "disk full":
        ended(process, draw.uniform(0.0, 0.8 * seconds))
        with full(processes.folder, draw.choice([0, 5_000, 60_000])):
            ended(process, draw.uniform(0.1, 0.5) * seconds)
            killed = kill(process)
        code = ended(process)
        if not killed and code not in (0, 2, -signal.SIGKILL):
            tally.faults.append(f"{run}, disk full: exit code {code}")
        tally.kills[way] += 1
    else:
        wait_for(way, path, process, draw, seconds)
        if not kill(process):
            code = ended(process)
            if code != 0:
                tally.faults.append(f"{run}, {way}: exit code {code}: {_words(processes.folder, run)}")
            return
        tally.kills[way] += 1
    now = events(path)
    restarts = [e["update"] for e in now if e["event"] == "restart"][n_restarts:]
    if restarts and way != "disk full" and restarts[0] < before:
        tally.faults.append(f"{run}: went on from update {restarts[0]}, and {before} was saved")
    reached, saved = last_update(path), _checkpointed(path)
    tally.lost.append(max(0, reached - saved))
    if reached - saved > SAVE:
        tally.faults.append(f"{run}, {way}: update {reached} was told of, the last checkpoint is {saved}")


def _words(folder: Path, run: str) -> str:
    lines = (folder / f"{run}.err").read_text().strip().splitlines()
    return lines[-1] if lines else ""


def _checkpointed(run: Path) -> int:
    """The update of the newest checkpoint by its name; 0: none."""
    return max((int(n[1:]) for n in _listed(run / "checkpoints") if n[:1] == "u" and n[1:].isdigit()), default=0)


def compare(whole: Path, run: Path) -> list[str]:
    """What differs."""
    faults = []
    if computed(whole) != computed(run):
        faults.append(f"{run.name}: the log differs")
    names = ["model.safetensors", "scores.json", "samples.json", "attention.json"]
    last = f"checkpoints/u{UPDATES:08d}/training.safetensors"
    faults += [
        f"{run.name}: {name} differs"
        for name in (*names, last)
        if (whole / name).read_bytes() != (run / name).read_bytes()
    ]
    updates = [e["update"] for e in events(run) if e["event"] == "update"]
    if updates != list(range(10, UPDATES + 1, 10)):
        faults.append(f"{run.name}: lines of updates are missing or there twice: {updates}")
    return faults


def campaign(folder: Path, *, kills: int, seed: int, most: int = 12) -> Tally:
    """Kill until `kills` have been, `most` times a training at the most, and compare each end."""
    began, draw, tally = time.monotonic(), random.Random(seed), Tally()
    processes = Processes(folder)
    write_texts(folder)
    for _ in range(2):  # twice: the first waits for the server to import
        shutil.rmtree(folder / "whole", ignore_errors=True)
        start = time.monotonic()
        assert ended(processes.start("whole")) == 0, _words(folder, "whole")
        seconds = time.monotonic() - start
    ways = [way for way in WAYS if way != "disk full" or os.path.ismount(folder)]
    number = 0
    while sum(tally.kills.values()) < kills:
        number += 1
        run = f"run{number}"
        for _ in range(draw.randint(1, most)):
            n = sum(tally.kills.values())
            if n >= kills:
                break
            shell = kills >= 20 and n % 10 == 9
            way = draw.choice(ways) if kills >= 20 else ways[n % len(ways)]
            one_kill(processes, run, way, draw, tally, seconds=seconds, shell=shell)
        code = ended(processes.start(run))
        tally.ends += 1
        found = [f"{run}: exit code {code}: {_words(folder, run)}"] if code else compare(folder / "whole", folder / run)
        tally.faults += found
        if not found:
            shutil.rmtree(folder / run)
        print(
            f"{sum(tally.kills.values())} kills, {tally.ends} ends, {len(tally.faults)} faults",
            file=sys.stderr,
            flush=True,
        )
    tally.seconds = time.monotonic() - began
    return tally


def write_texts(folder: Path) -> None:
    from transduce.demo.corpus import demo_pairs

    pairs = list(demo_pairs("train", 150, seed=1))
    for side in ("src", "tgt"):
        text = "".join(f"{getattr(pair, side)}\n" for pair in pairs)
        (folder / f"train.{'en' if side == 'src' else 'de'}").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/kills"))
    given = parser.parse_args()
    shutil.rmtree(given.folder, ignore_errors=True)
    with small_disk(given.folder, FREE_ON_DISK) as there:
        if not there:
            print("no small disk could be mounted: no kills with the disk full", file=sys.stderr)
        tally = campaign(given.folder, kills=given.kills, seed=given.seed)
    print("\n".join(tally.lines()))
    sys.exit(bool(tally.faults))


if __name__ == "__main__":
    main()
