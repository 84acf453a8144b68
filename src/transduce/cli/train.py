"""`transduce train`, and the checks before and after it: `doctor` and `verify`."""

from __future__ import annotations

import time
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


RecipeOrRun = Annotated[Path | None, argument("RECIPE|RUN", "Settings (TOML file), or a run folder.")]


@expand(Request, {"recipe": RecipeOrRun})
def doctor(
    request: Request,
    processes: Processes = 1,
    as_json: Annotated[bool, Option("--json", help="Print all findings and measurements as one JSON object.")] = False,
    quiet: Quiet = False,
) -> None:
    """Check data, memory, speed, time and disk space before training. Takes the options of train.

    Reads a sample, runs a few updates in a separate process and keeps nothing; takes about 20 seconds for any size of
    corpus. Prints "ready", or one line per problem and exits with code 2. For an existing run it reports the progress
    and what remains.

    \b
    transduce doctor --src train.en --tgt train.de --run runs/x
    transduce doctor recipe.toml --data texts --set model.preset=base
    transduce doctor --text book.txt --json
    transduce doctor --src train.en --tgt train.de --processes 2
    transduce doctor runs/x
    """
    began = time.monotonic()
    recipe = request.recipe
    if recipe is not None and not recipe.exists():
        raise SettingsError(f"neither a run folder nor a recipe {recipe} exists")
    if recipe is not None and recipe.is_dir():
        from transduce.runs.manifest import Manifest

        if request != Request(recipe=recipe):
            raise SettingsError(
                f"{recipe} is a run folder and has its own settings; use only --processes, --json and --quiet with it"
            )
        settings, run = Manifest.read(recipe).asked_settings(), recipe
    else:
        if request.run is None and recipe is None:
            request = replace(request, run=Path("runs") / "new")
        settings, run = request.settings(), request.run_folder()

    from transduce.doctor import diagnose
    from transduce.doctor.report import format_diagnosis
    from transduce.logging import Log
    from transduce.process import exit_on_signals

    seconds = max(0.5 * diagnose.SECONDS, diagnose.SECONDS - (time.monotonic() - began))  # less the time for imports
    with exit_on_signals():
        found = diagnose.diagnose(
            settings, run=run, log=Log(quiet=quiet or as_json), seconds=seconds, processes=processes
        )
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
