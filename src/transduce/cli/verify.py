"""`transduce verify`: checksums, and what a kill and a resume change: nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from transduce.cli.options import Overrides, Quiet
from transduce.cli.output import print_lines


def verify(
    path: Annotated[Path, Argument(metavar="RUN|RECIPE", help="A run folder, or a recipe.", show_default=False)],
    files: Annotated[bool, Option("--files", help="Only hold every file against its checksum.")] = False,
    updates: Annotated[
        int | None, Option(help="Updates of the trial trainings; default: some 20 seconds.", min=20, show_default=False)
    ] = None,
    kills: Annotated[int, Option(help="How often one of them is killed.", min=1)] = 3,
    seed: Annotated[int, Option(help="Of the moments of the kills.", min=0)] = 1,
    data: Annotated[
        Path | None, Option(metavar="FOLDER", help="Where a recipe's data paths start.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    quiet: Quiet = False,
) -> None:
    """Check every file of a run, and show that a kill and a resume change nothing on this machine.

    Trains a little with the run's settings and text, beside the run; the same again, killed with SIGKILL at random
    moments; then compares losses and weights bit for bit. The run itself is not touched. Exit code 1: something is
    damaged or differs.

    \b
    transduce verify runs/mine
    transduce verify runs/mine --files
    transduce verify recipe.toml --data texts
    """
    from transduce.errors import SettingsError
    from transduce.logging import Log

    log, settings = Log(quiet=quiet), None
    if path.is_file():
        from transduce.cli.request import Request

        if files:
            raise SettingsError(f"--files looks at a run folder, and {path} is a recipe")

        settings = Request(recipe=path, data=data, overrides=overrides, run=path.with_suffix("")).settings()
    else:
        from transduce.runs.verify import verify_files

        if overrides or data:
            raise SettingsError("--set and --data are for a recipe; a run has its settings")
        found = verify_files(path)
        print_lines([one.line() for one in found])
        n_wrong = sum(bool(one.wrong) for one in found)
        print_lines(
            [f"{n_wrong} of {len(found)} files are damaged" if n_wrong else f"all {len(found)} files are as written"]
        )
        if n_wrong:
            raise typer.Exit(1)
    if not files:
        from transduce.doctor.resume_trial import verify as run_verify
        from transduce.process import exit_on_signals

        with exit_on_signals():
            same = run_verify(path, settings, updates=updates, kills=kills, seed=seed, log=log)
        print_lines(
            ["verified: killed and resumed, a training comes to the same end" if same else "DIFFERENT: see above"]
        )
        if not same:
            raise typer.Exit(1)
