"""`transduce shortlist`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from transduce.cli.options import Quiet, Run, option
from transduce.cli.output import print_lines


def shortlist(
    run: Run,
    data: Annotated[Path | None, option(metavar="FOLDER", help="Folder of the training text, if it was moved.")] = None,
    n_best: Annotated[int, Option(help="Target tokens per source token, up to 512.", min=1)] = 50,
    n_frequent: Annotated[int, Option(help="Most frequent target tokens, in every list, up to 65,536.", min=1)] = 100,
    max_loss: Annotated[float, Option(help="BLEU that it may lose on the validation text.", min=0.0)] = 0.1,
    overrides: Annotated[
        list[str] | None,
        option("--set", metavar="KEY=VALUE", help="Override a setting of data, to read other text; repeatable."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Make a run's shortlist, for faster translation.

    `translate --shortlist` uses it. Reads the training text again and learns
    which tokens translate which (IBM Model 1). Of a large text, an even sample
    of the sentence pairs is used. Translates the validation text with and
    without the shortlist, and writes none that loses more BLEU than --max-loss.

    With a shortlist, beam search and single sentences are faster. Greedy search
    of many sentences at once is mostly slower: 0.7 to 1.05 of the speed without.

    \b
    transduce shortlist runs/x
    transduce translate runs/x --shortlist < in.en > out.de
    transduce shortlist runs/x --n-best 100 --max-loss 0.2
    """
    from transduce.config.recipe import apply_overrides
    from transduce.distillation.shortlist import ShortlistOptions, make_shortlist
    from transduce.logging import Log

    changes: dict[str, Any] = {}
    apply_overrides(changes, overrides)
    options = ShortlistOptions(n_best=n_best, n_frequent=n_frequent, max_loss=max_loss)
    path = make_shortlist(run, options, changes=changes, data=data, log=Log(quiet=quiet))
    print_lines([f"written: {path}"])
