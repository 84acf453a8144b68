"""`transduce train`, and the checks before and after it: `doctor` and `verify`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from transduce.cli.options import Processes, Quiet, argument, expand
from transduce.cli.output import print_lines, to_json
from transduce.cli.request import Request
from transduce.errors import SettingsError

if TYPE_CHECKING:
    from transduce.runs.folder import RunFolder
    from transduce.training.ranks import Ranks


@expand(Request)
def train(
    request: Request,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Read the data, print the settings that training would use, and stop.")
    ] = False,
    processes: Processes = 1,
    quiet: Quiet = False,
) -> None:
    """Train a translator, a language model or a classifier.

    Unset settings are derived from the data and the machine, and printed with the reason. The same command resumes an
    interrupted run. Text files may be compressed (.gz, .xz, .zst). Masked models and classifiers need a recipe.

    \b
    transduce train --src train.en --tgt train.de --run runs/x
    transduce train --path memory.tmx --src-lang en --tgt-lang de --run runs/tm
    transduce train recipe.toml --data texts --set training.lr=0.003
    transduce train --text book.txt --run runs/book
    transduce train --from runs/x --src new.en --tgt new.de --run runs/y
    transduce train --src a.en --tgt a.de --run runs/x --processes 2
    """
    from transduce.distributed import launch

    launch.run_worker_if_asked(_learn_as_worker)
    settings, folder = request.settings(), request.run_folder()
    launch.launch_if_asked(1 if dry_run else processes)

    from transduce.logging import Log
    from transduce.pipeline import train as run_train

    run_train(settings, folder, log=Log(quiet=quiet), dry_run=dry_run)


def _learn_as_worker(folder: RunFolder, ranks: Ranks, device: str) -> None:
    from transduce.pipeline import learn_as_worker

    learn_as_worker(folder, ranks, device)


@expand(Request)
def doctor(
    request: Request,
    processes: Processes = 1,
    as_json: Annotated[bool, Option("--json", help="Print all findings and measurements as one JSON object.")] = False,
    quiet: Quiet = False,
) -> None:
    """Check text, memory and time before training. Takes the options of train.

    Reads the text, runs a few updates in a separate process and keeps nothing. Prints "ready", or one line per problem
    and exits with code 2.

    \b
    transduce doctor --src train.en --tgt train.de
    transduce doctor recipe.toml --data texts --set model.preset=base
    transduce doctor --text book.txt --json
    transduce doctor --src train.en --tgt train.de --processes 2
    """
    if request.recipe is not None and request.recipe.is_dir():
        raise SettingsError(f"{request.recipe} is a folder; doctor checks a training before it starts: name a recipe")
    if request.run is None and request.recipe is None:
        request = replace(request, run=Path("runs") / "new")
    settings = request.settings()

    from transduce.doctor.diagnose import diagnose, format_diagnosis
    from transduce.logging import Log
    from transduce.process import exit_on_signals

    with exit_on_signals():
        found = diagnose(settings, log=Log(quiet=quiet or as_json), processes=processes)
    print_lines([to_json(found.to_json())] if as_json else format_diagnosis(found))
    if not found.ready:
        raise typer.Exit(2)


def verify(path: Annotated[Path, argument("RUN", "A run folder.")]) -> None:
    """Check every file of a run against its checksum.

    Exit code 1: a file is damaged or missing.

    \b
    transduce verify runs/mine
    """
    from transduce.runs.verify import summary, verify_files

    if path.is_file():
        raise SettingsError(f"{path} is a file; verify checks a run folder")
    found = verify_files(path)
    print_lines([*(one.line() for one in found), summary(found)])
    if any(one.is_error for one in found):
        raise typer.Exit(1)
