"""A process that runs cases by number and reports the outcome of each as a line of JSON.

python -m fuzz.worker ORIGINALS SCRATCH SEED QUICK < numbers
"""

# ruff: noqa: E501  (long tables of strange values)
import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # a module that is compiled while a case runs would look like damage

MEMORY = 700 << 20
"""Bytes that a case may allocate in addition to the process's own."""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.remove": 1, "os.rename": 2, "os.rmdir": 1, "os.mkdir": 1, "os.link": 2, "os.symlink": 2, "os.chmod": 1,
           "os.chown": 1, "os.truncate": 1, "shutil.rmtree": 1, "shutil.move": 2, "os.utime": 1}  # fmt: skip
NEVER = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.startfile", "subprocess.Popen", "pickle.find_class",
         "socket.connect", "socket.getaddrinfo", "ftplib.connect", "urllib.Request")  # fmt: skip


class Guard:
    """Records what a case does outside its folder."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.canary = ""
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "subprocess.Popen" and arguments[0] == "uname":
            return  # Python reads the machine's type
        if event in NEVER:
            self.seen.append(f"{event} {str(arguments)[:80]}")
        elif event == "open":
            path, mode, flags = arguments
            if isinstance(path, str | bytes) and (
                (mode and set(str(mode)) & set("wax+")) or (isinstance(flags, int) and flags & WRITING)
            ):
                self._check(event, path)
        elif event in CHANGES:
            for path in arguments[: CHANGES[event]]:
                if isinstance(path, str | bytes):
                    self._check(event, path)

    def _check(self, event: str, path: str | bytes) -> None:
        found = os.path.realpath(os.path.dirname(os.fsdecode(path)) or ".")
        whole = os.path.realpath(os.fsdecode(path)) if event == "open" else found
        if os.path.realpath(os.fsdecode(path)) == self.folder and event == "os.mkdir":
            return  # it exists
        if (
            os.path.isabs(os.fsdecode(path))
            and not (whole + "/").startswith(f"{self.folder}/")
            and whole != "/dev/null"
        ):
            self.seen.append(f"{event} {os.fsdecode(path)}")


def state_of(folder: Path) -> dict[str, tuple[str, int]]:
    """Digest and mode of every file in a folder and its subfolders."""
    found = {}
    for path in sorted(folder.rglob("*")):
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = (content, path.lstat().st_mode)
    return found


def high_water() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def outcome_of(case: Any, scratch: Path, guard: Guard) -> tuple[str, str]:
    """The outcome of the case in one word, and its output."""
    from system.commands import transduce

    canary = scratch / "canary"
    before = state_of(canary)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    base = high_water()
    guard.seen, guard.folder = [], str(scratch / "case")
    try:
        done = transduce(*case.arguments)
    except BaseException as error:  # any error, panics of native code included
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.filename.split('transduce/')[-1]}:{where.lineno}"
        return "TRACEBACK", f"{type(error).__name__}: {str(error)[:300]} at {place}"
    finally:
        guard.folder = None
    last = done.err.strip().splitlines()[-1] if done.err.strip() else ""
    if high_water() - base > MEMORY:
        return "MEMORY", f"{(high_water() - base) >> 20} MiB: {last[:200]}"
    if guard.seen:
        return "TOUCHED", "; ".join(guard.seen[:3])
    if (after := state_of(canary)) != before:
        changed = [key for key, value in after.items() if before.get(key) != value]
        return "TOUCHED", f"{changed} {before.keys() - after.keys()}"
    if "Traceback" in done.err or "panicked" in done.err:
        return "TRACEBACK", done.err[-300:]
    if done.code == 0:
        return ("SILENT" if case.sealed else "loaded"), last[:200]
    if done.code not in (1, 2) or not last.startswith("transduce: error: ") or "out of memory" in last:
        return "UNCLEAR", f"{done.code}: {last[:300]}"
    if len(last) > 3000:
        return "UNCLEAR", f"{len(last)} characters: {last[:200]}"
    names = (case.file.name, "/case", "/canary", "/dev/zero")
    if done.code == 2 and not any(name in last for name in names) and not _names_settings(case, last):
        return "UNNAMED", f"{done.code}: {last[:300]}"
    return ("refused" if done.code == 2 else "failed"), last[:300]


def _names_settings(case: Any, output: str) -> bool:
    """Errors in a recipe name settings instead of files."""
    parts = ("data", "model", "training", "tokenizer", "decoding", "task", "evaluation", "name")
    return case.file.name == "recipe.toml" and any(part in output for part in parts)


def main() -> None:
    originals, scratch, seed, quick = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "1"
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    import torch
    import typer

    torch.set_num_threads(1)
    from fuzz.cases import TARGETS, copy_tree, make_case
    from fuzz.originals import make
    from system.commands import transduce
    from transduce import __main__ as entry
    from transduce import machine

    targets = [target for target in TARGETS if target.quick or not quick]
    guard = Guard()
    scratch.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(target.original for target in targets):
        make(name, originals)
    warm = make("translation" if any(t.original == "translation" for t in targets) else "marian", originals)
    (scratch / "in.txt").write_text("A dog.\nDer Hund schläft.\n", encoding="utf-8")
    transduce("translate", warm / "finished", scratch / "in.txt", "--beam", "1")
    if (warm / "command.json").exists():  # imports and caches of a first run must not count for a case
        shutil.rmtree(scratch / "warm", ignore_errors=True)
        copy_tree(warm, scratch / "warm")
        command = json.loads((scratch / "warm" / "command.json").read_text())
        transduce(*command, "--run", scratch / "warm" / "halfway")
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 30), resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    entry.app = typer.main.get_command(entry.app)  # made once: it takes most of a case's time
    machine.choose_precision = lambda device: "float32"  # without measuring this machine again
    print(json.dumps({"ready": True}), file=out)
    for line in sys.stdin:
        number = int(line)
        draw = random.Random(f"{seed} {number}")
        target = draw.choices(targets, [t.weight for t in targets])[0]
        for path in (scratch / "case", scratch / "canary"):
            shutil.rmtree(path, ignore_errors=True)
        (scratch / "canary").mkdir()
        (scratch / "canary" / "victim").write_text("untouched")
        case = make_case(originals / target.original, scratch / "case", target, draw)
        file = str(case.file.relative_to(scratch / "case"))
        print(json.dumps({"begins": number, "kind": case.kind, "file": file, "damage": case.damage}), file=out)
        began = time.monotonic()
        outcome, output = outcome_of(case, scratch, guard)
        print(json.dumps({"outcome": outcome, "output": output, "seconds": time.monotonic() - began}), file=out)


if __name__ == "__main__":
    main()
