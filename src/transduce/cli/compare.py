"""`transduce compare`."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from transduce.cli.options import Json, Overrides, Quiet, argument, option
from transduce.cli.output import print_lines, to_json
from transduce.errors import SettingsError, nearest

if TYPE_CHECKING:
    from transduce.comparison.recipes import Budget

_NUMBER = re.compile(r"(\d+(?:\.\d*)?(?:e\d{1,2})?)([kMB]?)")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}


def compare(
    recipes: Annotated[list[Path], argument("RECIPES...", "Recipes (TOML files); the first is the baseline.")],
    run: Annotated[Path, option(metavar="FOLDER", help="Folder of the comparison.")],
    seeds: Annotated[int, Option(help="Number of trainings of each recipe, with different seeds.", min=1)] = 1,
    budget: Annotated[
        list[str] | None,
        option(
            metavar="WHAT=N",
            help="Budget of each training: minutes=10 or updates=2000; params=2.6M scales the widths (default: the "
            "limits of the first recipe); repeatable.",
        ),
    ] = None,
    data: Annotated[
        Path | None, option(metavar="FOLDER", help="Folder that the recipes' data paths are relative to.")
    ] = None,
    overrides: Overrides = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train recipes under the same conditions and compare the models.

    The first recipe sets text, vocabulary, batches, limits, search and scoring;
    others may leave them out. Prints a table of cost and quality, with the mean
    over seeds and paired significance against the first recipe, and writes
    compare.html and compare.json. The same command resumes; finished trainings
    are not repeated, and recipes and seeds can be added.

    \b
    transduce compare a.toml b.toml --run runs/compare --budget minutes=10
    transduce compare a.toml b.toml --run runs/compare --seeds 3
    transduce compare *.toml --run runs/equal --budget updates=2000,params=2.6M
    """
    from transduce.comparison.compare import compare as run_compare
    from transduce.logging import Log
    from transduce.process import interrupted_by

    with interrupted_by("SIGINT", "SIGTERM", "SIGHUP", then="the same command resumes"):
        found = run_compare(
            recipes,
            run,
            seeds=seeds,
            budget=parse_budget(",".join(budget or ())),
            data=data,
            overrides=overrides or (),
            log=Log(quiet=quiet),
        )
    print_lines([to_json(found.to_json())] if json else found.lines())
    if found.failed:
        raise typer.Exit(1)


def parse_budget(given: str) -> Budget:
    """Read `minutes=10`, `updates=2000`, `params=2.6M`, or several of them with commas."""
    from transduce.comparison.recipes import Budget

    found: dict[str, Any] = {}
    for text in filter(None, given.split(",")):
        name, _, number = (side.strip() for side in text.partition("="))
        if name not in Budget.__slots__:
            hint = nearest(name, Budget.__slots__)
            raise SettingsError(f"--budget '{text}'{hint}; allowed: minutes=10, updates=2000, params=2.6M")
        if name in found:
            raise SettingsError(f"--budget {text}: {name} is given twice; give it once")
        if (match := _NUMBER.fullmatch(number)) is None:
            raise SettingsError(f"--budget {text}: '{number}' is not a number; give one such as 10, 2000 or 2.6M")
        value = Decimal(match[1]) * _UNITS[match[2]]
        if name != "minutes" and value % 1:
            raise SettingsError(f"--budget {text}: {name} must be a whole number, such as {name}=2000")
        found[name] = float(value) if name == "minutes" else int(value)
    return Budget(**found)
