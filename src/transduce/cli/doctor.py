"""`transduce doctor`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from transduce.cli.options import Processes, Quiet, argument
from transduce.cli.output import print_lines, to_json
from transduce.cli.request import Request, expand_request

RecipeOrRun = Annotated[Path | None, argument("RECIPE|RUN", "Settings (TOML file), or a run folder.")]


@expand_request(recipe=RecipeOrRun)
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
    transduce doctor recipes/multi30k-en-de.toml --data multi30k --set model.preset=base
    transduce doctor --text book.txt --json
    transduce doctor --src train.en --tgt train.de --processes 2
    transduce doctor runs/x
    """
    began = time.monotonic()
    from dataclasses import replace

    from transduce.errors import SettingsError

    recipe = request.recipe
    if recipe is not None and recipe.is_dir():
        from transduce.runs.manifest import Manifest
        from transduce.runs.run_settings import asked_settings

        if request != Request(recipe=recipe):
            raise SettingsError(
                f"{recipe} is a run folder and has its own settings; use only --processes, --json and --quiet with it"
            )
        settings, run = asked_settings(Manifest.read(recipe)), recipe
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
