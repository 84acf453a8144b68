"""What translates the chunks of a bulk translation: this process, or worker processes.

A worker is `python -m transduce.decoding.bulk_workers`. It reads a line of JSON per request on stdin (the first is its
`Setup`) and answers each with a line on stdout. Its log and its errors go to stderr.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import transduce
from transduce.decoding.options import Sampling, TranslationOptions
from transduce.decoding.precision import AnyPrecision
from transduce.decoding.results import Note, Style, format_rows, note_on
from transduce.decoding.translator import Translator
from transduce.errors import RunFolderError, TransduceError, UserError, is_out_of_memory
from transduce.process import child_environment, exit_with_parent, n_cores
from transduce.runs.folder import RunFolder
from transduce.runs.tensor_file import load_metadata

_SECONDS_TO_EXIT = 10.0


class Translated(NamedTuple):
    """Rows of output, and notes."""

    rows: list[str]
    notes: list[Note]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How to translate: the arguments of `translate_to_folder` without the files."""

    run: str
    options: TranslationOptions
    style: Style = "text"
    device: str = "auto"
    precision: AnyPrecision = "float32"

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Setup:
        """The object of which `values` are the fields."""
        sampling = values["options"]["sampling"]
        options = {**values["options"], "sampling": None if sampling is None else Sampling(**sampling)}
        return cls(**{**values, "options": TranslationOptions(**options)})


class ChunkTranslator:
    """Translates lists of lines into rows of output. `how`: everything that the output depends on, for JSON."""

    def __init__(self, setup: Setup) -> None:
        """Load the model. Raises the errors of `Translator.load`."""
        self._options, self._style = replace(setup.options, scores=setup.style != "text"), setup.style
        identity = run_identity(setup.run)
        self._translator = Translator.load(setup.run, device=setup.device, precision=setup.precision)
        if run_identity(setup.run) != identity:
            raise RunFolderError(f"{setup.run} was changed while it was loaded; wait until its training has ended")
        self.notes = self._translator.choice.notes()
        options = asdict(self._options)
        del options["batch_tokens"]  # a translation does not depend on its batch
        self.how = {
            "transduce": transduce.__version__,
            "run": identity,
            "style": setup.style,
            "precision": self._translator.choice.precision,
            "shortlist of": self._translator.shortlist().digest if self._options.shortlist else "",
            "engine": f"{type(self._translator.engine).__name__} on {self._translator.device}",
            **options,
        }

    def translate(self, first: int, lines: list[str]) -> Translated:
        """Translate lines; `first` is the number of lines before them in their file."""
        rows: list[str] = []
        notes = []
        translations = self._translator.translate_lines(lines, self._options, first=first)
        for number, (src, one) in enumerate(zip(lines, translations, strict=True), first + 1):
            rows += format_rows(self._style, number, src, one, n_best=self._options.n_best)
            if note := note_on(self._style, number, src, one):
                notes.append(note)
        return Translated(rows, notes)


def run_identity(run: str) -> str:
    """A digest of the files and settings of a run that its translations depend on. It moves with the folder."""
    folder = RunFolder.open(Path(run))
    settings = folder.settings
    parts = {
        "model": load_metadata(folder.path / "model.safetensors").get("sha256"),
        "tokenizers": folder.manifest.tokenizers,
        "settings": [settings.model.model_dump(mode="json"), settings.decoding.model_dump(exclude={"batch_tokens"})],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Worker:
    """A chunk translator in another process. Its methods take and return JSON; errors are in the answer."""

    def load(self, setup: Mapping[str, Any]) -> dict[str, Any]:
        """Load the model."""
        return _answer_of(lambda: self._load(Setup.from_json(setup)))

    def _load(self, setup: Setup) -> dict[str, Any]:
        self._translator = ChunkTranslator(setup)
        return {"how": self._translator.how, "notes": self._translator.notes}

    def translate(self, first: int, lines: list[str]) -> dict[str, Any]:
        """See `ChunkTranslator.translate`."""
        return _answer_of(lambda: self._translator.translate(first, lines)._asdict())


def _answer_of(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a worker answers: the result of its work, or the error."""
    try:
        return work()
    except TransduceError as error:
        return {"error": str(error), "exit_code": error.exit_code}
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return {"error": "out of memory; fewer workers or smaller --batch-tokens may help", "exit_code": 1}


def result_of(answer: dict[str, Any]) -> dict[str, Any]:
    """The result in the answer of a `Worker`. Raises `TransduceError` if it is an error."""
    if "error" in answer:
        raise (UserError if answer["exit_code"] == UserError.exit_code else TransduceError)(answer["error"])
    return answer


class Translators(NamedTuple):
    """`n` chunk translators. `submit` takes the arguments of `translate`, and returns a function that waits for it.

    `notes`: see `EngineChoice.notes`.
    """

    how: dict[str, Any]
    notes: list[str]
    n: int
    submit: Callable[[int, list[str]], Callable[[], Translated]]

    @classmethod
    def one(cls, translator: ChunkTranslator) -> Translators:
        """A translator in this process, which works when it is waited for."""
        return cls(translator.how, translator.notes, 1, lambda *chunk: partial(translator.translate, *chunk))


@contextlib.contextmanager
def open_translators(setup: Setup, n: int) -> Iterator[Translators]:
    """Load the model in this process (`n` = 1) or in `n` worker processes, which are killed at the end."""
    if n == 1:
        yield Translators.one(ChunkTranslator(setup))
        return
    with ThreadPoolExecutor(n) as threads, _start_workers(n) as workers:
        for worker in workers:
            _send(worker, asdict(setup))
        loaded = [_receive(worker) for worker in workers]
        if any(one != loaded[0] for one in loaded):
            raise RunFolderError(f"{setup.run} was changed while it was loaded; wait until its training has ended")
        free: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for worker in workers:
            free.put(worker)

        def translate(first: int, lines: list[str]) -> Translated:
            worker = free.get()
            try:
                _send(worker, {"first": first, "lines": lines})
                return Translated(**_receive(worker))
            finally:
                free.put(worker)

        yield Translators(**loaded[0], n=n, submit=lambda *chunk: threads.submit(translate, *chunk).result)


@contextlib.contextmanager
def _start_workers(n: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start workers, in sessions of their own, so that Ctrl-C reaches this process only. They exit with it."""
    environment = {"OMP_NUM_THREADS": str(max(1, n_cores() // n)), **child_environment()}
    command, pipe = [sys.executable, "-m", "transduce.decoding.bulk_workers"], subprocess.PIPE
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(n):
            workers.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True))
        yield workers
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait()


def _send(worker: subprocess.Popen[bytes], value: Any) -> None:
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # `_receive` reports why the worker has exited
        worker.stdin.write(json.dumps(value).encode() + b"\n")
        worker.stdin.flush()


def _receive(worker: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The answer of a worker. Raises its `TransduceError`, or one that says how it has ended."""
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line.endswith(b"\n"):
        code = worker.wait(_SECONDS_TO_EXIT)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        raise TransduceError(f"a worker process {how}; the same command resumes")
    return result_of(json.loads(line))


def main() -> None:
    """Run a worker: translate what stdin asks for until it ends."""
    exit_with_parent()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints

    def answer(value: Any) -> None:
        answers.write(json.dumps(value).encode() + b"\n")
        answers.flush()

    worker = Worker()
    answer(worker.load(json.loads(sys.stdin.buffer.readline())))
    for line in sys.stdin.buffer:
        answer(worker.translate(**json.loads(line)))


if __name__ == "__main__":
    main()
