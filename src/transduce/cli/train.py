"""`transduce train`, and the checks before and after it: `doctor` and `verify`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from transduce.cli.options import MaxRestarts, Overrides, Processes, Quiet, Run, argument, expand, option
from transduce.cli.output import print_lines, to_json
from transduce.cli.request import Request
from transduce.errors import SettingsError, check_known


@expand(Request)
def train(
    request: Request,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Read the data, print the settings that training would use, and stop.")
    ] = False,
    processes: Processes = 1,
    max_restarts: MaxRestarts = 0,
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
    from transduce.distributed.environment import this_process

    launch.stop_with_launcher()
    if this_process().rank > 0:
        from transduce.pipeline import run_worker

        sys.exit(run_worker())
    settings, folder = request.settings(), request.run_folder()
    if not dry_run:
        launch.launch_if_asked(processes, max_restarts=max_restarts)

    from transduce.logging import Log
    from transduce.pipeline import train as run_train

    run_train(settings, folder, log=Log(quiet=quiet), dry_run=dry_run)


@expand(Request)
def prepare(
    request: Request,
    ray: Annotated[
        str | None,
        option(metavar="ADDRESS", help="Clean and encode pairs on a Ray cluster: HOST:PORT of its head, or auto."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Read, clean and encode the text of a training. The same options of train continue from there.

    A killed command resumes. Sentence pairs are cleaned and encoded by a process per core (data.workers), or by the
    nodes of a Ray cluster.

    \b
    transduce prepare --src train.en --tgt train.de --run runs/x
    transduce prepare recipe.toml --run runs/x --set data.workers=4
    transduce prepare recipe.toml --run runs/x --ray auto
    """
    settings, folder = request.settings(), request.run_folder()
    if ray is not None and settings.task != "translation":
        raise SettingsError(
            f"--ray with task = '{settings.task}': a cluster prepares task = 'translation'; leave --ray out"
        )

    from transduce.bulk.ray_cluster import RayCluster
    from transduce.logging import Log
    from transduce.pipeline import prepare as run_prepare
    from transduce.process import exit_on_signals

    log = Log(quiet=quiet)
    with exit_on_signals():
        run_prepare(settings, folder, log=log, workers=None if ray is None else RayCluster(ray).workers(log))
    log.say(f"prepared: {folder / 'tokens'}; transduce train with the same options trains")


@expand(Request)
def doctor(
    request: Request,
    processes: Processes = 1,
    gpus: Annotated[
        int | None, option(help="GPUs of each machine, for a forecast of a training on GPUs that are not here.", min=1)
    ] = None,
    nodes: Annotated[int | None, option(help="Machines of the forecast (default: 1).", min=1)] = None,
    gpu: Annotated[
        str | None, option(help="Kind of GPU of the forecast: p100, v100, a100, h100 or h200 (default: h100).")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print all findings and measurements as one JSON object.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print only the result.")] = False,
) -> None:
    """Check text, memory and time before training. Takes the options of train.

    Reads the text, runs a few updates in a separate process and keeps nothing. Prints "ready", or one line per obstacle
    and exits with code 2. Warnings do not change the exit code.

    \b
    transduce doctor --src train.en --tgt train.de
    transduce doctor recipe.toml --data texts --set model.preset=base
    transduce doctor --text book.txt --json
    transduce doctor --src train.en --tgt train.de --processes 2
    transduce doctor recipe.toml --data texts --gpus 8 --nodes 4 --gpu a100
    """
    if request.recipe is not None and request.recipe.is_dir():
        raise SettingsError(f"{request.recipe} is a folder; doctor checks a training before it starts: name a recipe")
    if gpus is None and (given := [name for name, one in (("--nodes", nodes), ("--gpu", gpu)) if one is not None]):
        raise SettingsError(f"{', '.join(given)}: only for the forecast of --gpus N; add --gpus N, or leave it out")
    if request.run is None and request.recipe is None:
        request = replace(request, run=Path("runs") / "new")
    settings = request.settings()

    from transduce.doctor.cluster import GPUS, Cluster
    from transduce.doctor.diagnose import diagnose, format_diagnosis
    from transduce.logging import Log
    from transduce.process import exit_on_signals

    check_known("--gpu", kind := gpu or "h100", GPUS)
    cluster = None if gpus is None else Cluster(kind, gpus, nodes or 1)
    with exit_on_signals():
        found = diagnose(settings, log=Log(quiet=quiet or as_json), processes=processes, cluster=cluster)
    print_lines([to_json(found.to_json())] if as_json else format_diagnosis(found))
    if not found.ready:
        raise typer.Exit(2)


def report(run: Run) -> None:
    """Write report.html of a run from what it has measured so far, also while it is trained.

    Also writes the model card (README.md) of a finished training if it is missing.

    \b
    transduce report runs/mine
    """
    from transduce.pipeline import rebuild_report

    print_lines([str(rebuild_report(run))])


def verify(
    path: Annotated[Path, argument("RUN|RECIPE", "A run folder, or a recipe.")],
    files: Annotated[bool, Option("--files", help="Only check the files of the run; train nothing.")] = False,
    updates: Annotated[
        int | None,
        option(help="Number of updates of a trial training (default: 40 to 300, about 20 seconds).", min=20),
    ] = None,
    kills: Annotated[int, Option(help="Number of kills.", min=1)] = 3,
    seed: Annotated[int, Option(help="Random seed for the moments of the kills.", min=0)] = 1,
    data: Annotated[
        Path | None, option(metavar="FOLDER", help="Folder that the recipe's data paths are relative to.")
    ] = None,
    overrides: Overrides = None,
    quiet: Quiet = False,
) -> None:
    """Check the files of a run, and that resuming is exact.

    Trains briefly with the run's settings and text in a temporary folder next to the run, then again with SIGKILL at
    random moments, and compares losses and weights bit for bit. The run is not changed. Exit code 1: a file is damaged
    or missing, or the trainings differ by more than ten times what two without kills do.

    \b
    transduce verify runs/mine
    transduce verify runs/mine --files
    transduce verify recipe.toml --data texts
    """
    from transduce.logging import Log
    from transduce.process import exit_on_signals

    settings = None
    if path.is_file():
        if files:
            raise SettingsError(f"--files checks a run folder, and {path} is a recipe")
        settings = Request(recipe=path, data=data, overrides=overrides, run=path.with_suffix("")).settings()
    elif overrides or data:
        raise SettingsError("--set and --data go with a recipe; a run has its own settings")
    else:
        _check_files(path)
    if files:
        return
    from transduce.verification.resume import verify_resume

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
    from transduce.verification.files import summary, verify_files

    found = verify_files(path)
    print_lines([*(one.line() for one in found), summary(found)])
    if any(one.is_error for one in found):
        raise typer.Exit(1)
