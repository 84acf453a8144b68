"""`transduce train`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from transduce.cli.options import Processes, Quiet
from transduce.cli.request import Request, expand_request

if TYPE_CHECKING:
    from transduce.runs.folder import RunFolder
    from transduce.training.ranks import Ranks


@expand_request()
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
    transduce train recipes/multi30k-en-de.toml --data multi30k --set training.lr=0.003
    transduce train --text book.txt --run runs/book
    transduce train --from runs/x --src new.en --tgt new.de --run runs/y --extend-vocabulary 500
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
