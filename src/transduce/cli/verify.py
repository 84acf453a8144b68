"""`transduce verify`: check all files of a run, and that a kill and a resume change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from transduce.cli.options import Overrides, Quiet
from transduce.cli.output import print_lines


def verify(
    path: Annotated[Path, Argument(metavar="RUN|RECIPE", help="A run folder, or a recipe.", show_default=False)],
    files: Annotated[bool, Option("--files", help="Only check the files of the run; train nothing.")] = False,
    updates: Annotated[
        int | None,
        Option(help="Number of updates of a trial training (default: about 20 seconds).", min=20, show_default=False),
    ] = None,
    kills: Annotated[int, Option(help="Number of kills.", min=1)] = 3,
    seed: Annotated[int, Option(help="Random seed for the moments of the kills.", min=0)] = 1,
    data: Annotated[
        Path | None, Option(metavar="FOLDER", help="Base folder of a recipe's data paths.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    quiet: Quiet = False,
) -> None:
    """Check the files of a run, and that resuming is exact.

    Trains briefly with the run's settings and text in a temporary folder next to the run, then again with SIGKILL at
    random moments, and compares losses and weights bit for bit. The run is not changed. Exit code 1: a file is damaged
    or missing, or the trainings differ.

    \b
    transduce verify runs/mine
    transduce verify runs/mine --files
    transduce verify recipe.toml --data texts
    """
    from transduce.errors import SettingsError
    from transduce.logging import Log
    from transduce.process import exit_on_signals

    settings = None
    if path.is_file():
        from transduce.cli.request import Request

        if files:
            raise SettingsError(f"--files checks a run folder, and {path} is a recipe")
        settings = Request(recipe=path, data=data, overrides=overrides, run=path.with_suffix("")).settings()
    elif overrides or data:
        raise SettingsError("--set and --data go with a recipe; a run has its own settings")
    else:
        _check_files(path)
    if files:
        return
    from transduce.doctor.resume_trial import verify_resume

    with exit_on_signals():
        same, not_verified = verify_resume(
            path, settings, updates=updates, kills=kills, seed=seed, log=Log(quiet=quiet)
        )
    if not same:
        print_lines(["DIFFERENT: a killed and resumed training ends with other weights; see above"])
        raise typer.Exit(1)
    print_lines(["verified: a killed and resumed training ends with the same weights"])
    if not_verified:
        print_lines([f"not verified, as the trial replaces it: {not_verified}"])


def _check_files(path: Path) -> None:
    """Print the status of every file of a run; exit code 1 if one is damaged or missing."""
    from transduce.runs.verify import summary, verify_files

    found = verify_files(path)
    print_lines([*(one.line() for one in found), summary(found)])
    if any(one.is_error for one in found):
        raise typer.Exit(1)
