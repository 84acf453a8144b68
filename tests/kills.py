"""Kill real trainings at random moments, and compare their results with an uninterrupted one.

    python tests/kills.py --kills 200

Every process runs `transduce train` as a user would, from the text to the report. The killer watches the run folder
from outside and kills: uniformly at random; while a file is being written (there is an `.aside` name); while the text
is being prepared; around a validation and the end of an epoch; and with a full disk, if the folder is on a small one (a
tmpfs, which only root can mount). Processes are forked from a server that has imported PyTorch, a hundred times
faster; every tenth is started as a shell command.

Checked after every kill: the next start succeeds and resumes from a checkpoint at most one save interval back. Checked
when a run finishes: log and weights equal those of the uninterrupted run bit for bit, no line is missing or repeated,
and the log contains the restarts.
"""

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
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).parent
UPDATES, VALID, SAVE = 120, 30, 10
FREE_ON_DISK = 24 << 20  # bytes of the small disk
SETTINGS = {
    "model.d_model": 16, "model.d_ff": 32, "model.n_heads": 2, "model.n_encoder_layers": 1, "model.n_decoder_layers": 1,
    "tokenizer.vocab_size": 120, "tokenizer.normalization": "identity", "tokenizer.sampling": 0.1,
    "training.batch_tokens": 256, "training.precision": "float32", "training.device": "cpu", "training.lr": 0.01,
    "training.max_updates": UPDATES, "training.valid_updates": VALID, "training.save_updates": SAVE,
    "training.valid_bleu_sentences": 4, "decoding.max_length": 12, "training.average": "last", "training.average_n": 2,
}  # fmt: skip
ALL_WELL = "every restart succeeded; every result equals that of the uninterrupted training, bit for bit"
WAYS = ("any time", "writing", "preparing", "validating", "disk full")


@dataclass
class Tally:
    """Counts and faults of a campaign."""

    kills: Counter[str] = field(default_factory=Counter)
    ends: int = 0
    lost: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def lines(self) -> list[str]:
        by_way = ", ".join(f"{way}: {n}" for way, n in self.kills.items())
        return [
            f"{sum(self.kills.values())} kills ({by_way}), {self.ends} finished trainings, {self.seconds:.0f} seconds",
            f"updates lost by a kill: at most {max(self.lost, default=0)}, on average "
            f"{sum(self.lost) / max(1, len(self.lost)):.1f}, of {SAVE} between two checkpoints",
            *(self.faults or [ALL_WELL]),
        ]


def command_of(folder: Path, run: str) -> list[str]:
    sets = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    texts = ["--src", str(folder / "train.en"), "--tgt", str(folder / "train.de")]
    return ["train", *texts, "--run", str(folder / run), "--quiet", *sets]


def child(arguments: list[str], errors: str) -> None:
    """Run `transduce` in a process forked from the server."""
    with open(errors, "a") as file:
        os.dup2(file.fileno(), 2)
    import torch

    torch.set_num_threads(1)
    from transduce.__main__ import main

    main(arguments)


def bulk_child(arguments: list[str], errors: str, chunk_lines: int) -> None:
    """`child`, with bulk translations in chunks of so many lines."""
    from transduce.bulk import translate as bulk

    bulk.CHUNK_LINES = chunk_lines
    child(arguments, errors)


def preparing_child(text: Path, run: Path, when: str, number: int) -> None:
    """Prepare in 8 chunks, log the calls, and kill this process at the call `when` after `number` of them."""
    from transduce.config.settings import Settings
    from transduce.data import clean, encoding, preparation, store
    from transduce.logging import Log
    from transduce.pipeline import prepare

    log, left = run.with_suffix(".calls").open("w", buffering=1), [number]

    def counted(name: str, original: Any) -> Any:
        def call(*args: Any) -> Any:
            if when == name:
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
            print(name, file=log)
            return original(*args)

        return call

    preparation.CHUNK = 400
    clean.CleanPairs.__call__ = counted("clean", clean.CleanPairs.__call__)  # type: ignore[method-assign]
    encoding.EncodePairs.__call__ = counted("encode", encoding.EncodePairs.__call__)  # type: ignore[method-assign]
    store.write_json = counted("close", store.write_json)
    corpora = [{"src": str(text / "a.en"), "tgt": str(text / "a.de")}]
    asked = {
        "data": {"train": corpora, "deduplicate": True, "workers": 1},
        "tokenizer": {"vocab_size": 60},
        "model": {"d_model": 16, "d_ff": 16, "n_heads": 2, "n_encoder_layers": 1, "n_decoder_layers": 1},
        "training": {"batch_tokens": 2000, "max_updates": 1},
    }
    prepare(Settings.from_mapping(asked), run, log=Log(quiet=True))


class Processes:
    """Starts trainings: most from a server, some as shell commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context = multiprocessing.get_context("forkserver")
        # The last two are otherwise imported late, which would take most of the time.
        names = ["torch", "torch._dynamo", "sentencepiece", "sacrebleu", "transduce.pipeline", "transduce.__main__"]
        self.context.set_forkserver_preload(names)
        with mock.patch.dict(os.environ, self.environment()):
            forkserver.ensure_running()

    @staticmethod
    def environment() -> dict[str, str]:
        """For processes that run the code of this tree."""
        paths = str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")
        return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def start(self, run: str, *, shell: bool = False) -> subprocess.Popen[bytes] | Any:
        arguments, errors = command_of(self.folder, run), str(self.folder / f"{run}.err")
        if shell:
            with open(errors, "ab") as file:
                command = [sys.executable, "-m", "transduce", *arguments]
                return subprocess.Popen(command, stderr=file, env=self.environment())
        process = self.context.Process(target=child, args=(arguments, errors))
        process.start()
        return process


def ended(process: Any, timeout: float | None = None) -> int | None:
    """The exit code, or None if the process is still running after `timeout`."""
    if isinstance(process, subprocess.Popen):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout)
        return None
    process.join(timeout)
    return process.exitcode


def events(run: Path, kind: str = "") -> list[dict[str, Any]]:
    """The lines of a run's log that are complete, or those of one kind of event."""
    try:
        found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n")[:-1]]
    except OSError:
        return []
    return [event for event in found if kind in ("", event["event"])]


def last_update(run: Path) -> int:
    return max((e["update"] for e in events(run) if e["event"] != "restart"), default=0)


def computed(run: Path) -> list[dict[str, Any]]:
    left_out = ("seconds", "tokens_per_second", "validation_seconds", "minutes", "memory")
    found = [e for e in events(run) if e["event"] != "restart"]
    return [{k: v for k, v in e.items() if k not in left_out} for e in found]


def wait_for(way: str, run: Path, process: Any, draw: random.Random, seconds: float) -> None:
    """Return at a moment of this kind, when the process has exited, or after a timeout."""
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
            break  # already prepared: any moment
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
    """Mount a small disk on `folder`; yields whether that was possible."""
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
    """Fill the disk of `folder` except for `room` bytes."""
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
    """Send SIGKILL; whether the process was still running."""
    if ended(process, 0) is not None:
        return False
    os.kill(process.pid, signal.SIGKILL)
    ended(process)
    return True


def kill_when(process: Any, mark: Path, *, seconds: float = 0.0) -> int:
    """Start a process, kill it when this path exists, or as long after that, and return its exit code."""
    process.start()
    while process.is_alive() and not mark.exists():
        time.sleep(0.0005)
    time.sleep(seconds)
    process.kill()
    process.join()
    return process.exitcode


def one_kill(
    processes: Processes, run: str, way: str, draw: random.Random, tally: Tally, *, seconds: float, shell: bool
) -> None:
    """Start or resume a training and kill it; or fill its disk, and let it fail or kill it."""
    path = processes.folder / run
    before = _checkpointed(path)
    n_restarts = len(events(path, "restart"))
    process = processes.start(run, shell=shell)
    if way == "disk full":
        ended(process, draw.uniform(0.0, 0.8 * seconds))
        with full(processes.folder, draw.choice([0, 5_000, 60_000])):
            ended(process, draw.uniform(0.1, 0.5) * seconds)
            killed = kill(process)
        code = ended(process)
        if not killed and code not in (0, 2, -signal.SIGKILL):
            tally.faults.append(f"{run}, disk full: exit code {code}: {_words(processes.folder, run)}")
        tally.kills[way] += 1
    else:
        wait_for(way, path, process, draw, seconds)
        if not kill(process):
            code = ended(process)
            if code != 0:
                tally.faults.append(f"{run}, {way}: exit code {code}: {_words(processes.folder, run)}")
            return
        tally.kills[way] += 1
    restarts = [e["update"] for e in events(path, "restart")][n_restarts:]
    if restarts and way != "disk full" and restarts[0] < before:
        tally.faults.append(f"{run}: resumed from update {restarts[0]}, but {before} was saved")
    reached, saved = last_update(path), _checkpointed(path)
    tally.lost.append(max(0, reached - saved))
    if reached - saved > SAVE:
        tally.faults.append(f"{run}, {way}: update {reached} was logged, but the last checkpoint is {saved}")


def _words(folder: Path, run: str) -> str:
    lines = (folder / f"{run}.err").read_text().strip().splitlines()
    return lines[-1] if lines else ""


def _checkpointed(run: Path) -> int:
    """The update of the newest checkpoint by its name; 0 if there is none."""
    return max((int(n[1:]) for n in _listed(run / "checkpoints") if n[:1] == "u" and n[1:].isdigit()), default=0)


def compare(whole: Path, run: Path) -> list[str]:
    """The differences between two finished runs."""
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
    updates = [e["update"] for e in events(run, "update")]
    if updates != list(range(10, UPDATES + 1, 10)):
        faults.append(f"{run.name}: log lines of updates are missing or repeated: {updates}")
    return faults


def campaign(folder: Path, *, kills: int, seed: int, most: int = 12) -> Tally:
    """Kill `kills` times, at most `most` times per training, and compare each finished run."""
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
        n_kills = sum(tally.kills.values())
        print(f"{n_kills} kills, {tally.ends} ends, {len(tally.faults)} faults", file=sys.stderr, flush=True)
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
            print("no small disk could be mounted: no kills with a full disk", file=sys.stderr)
        tally = campaign(given.folder, kills=given.kills, seed=given.seed)
    print("\n".join(tally.lines()))
    sys.exit(bool(tally.faults))


if __name__ == "__main__":
    main()
