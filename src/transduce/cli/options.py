"""Options that several commands share, each defined once. The options of a training are in `request.py`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option


def argument(metavar: str, help: str) -> Any:
    """An argument without a default, or with one that its help text explains."""
    return Argument(metavar=metavar, help=help, show_default=False)


def option(*names: str, help: str, metavar: str | None = None, min: Any = None) -> Any:
    """An option without a default, or with one that its help text explains."""
    return Option(*names, help=help, metavar=metavar, min=min, show_default=False)


def expand(request: type, annotations: Mapping[str, Any] = {}) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's first parameter, an object of the dataclass `request`, by one option per field.

    `annotations`: others for some of the fields, by name.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def expanded(**given: Any) -> None:
            command(request(**{field.name: given.pop(field.name) for field in fields(request)}), **given)

        shared = inspect.signature(request, eval_str=True).parameters.values()
        changed = [p.replace(annotation=annotations.get(p.name, p.annotation)) for p in shared]
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*changed, *own)]
        expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return expanded

    return decorate


Run = Annotated[Path, argument("RUN", "Run folder.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print warnings only.")]
Device = Annotated[str, Option(help="Device: auto, cpu or cuda.")]
PRECISIONS = "Precision: float32, float32-fast (on CPUs with AMX), int8 or bfloat16"
Precision = Annotated[str, Option(help=f"{PRECISIONS}.")]
Json = Annotated[bool, Option("--json", help="Print JSON, one object per line.")]
Overrides = Annotated[
    list[str] | None,
    option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. training.lr=0.001; repeatable."),
]
Processes = Annotated[
    int,
    Option(
        "--processes",
        help="Processes that train together on this machine, e.g. one per GPU; they share every batch.",
        min=1,
    ),
]

Beam = Annotated[int | None, option(help="Number of beams; 1 is greedy (default: the run's setting).", min=1)]
LengthPenalty = Annotated[float | None, option(help="Exponent of the length (default: the run's setting).", min=0.0)]
NoRepeatNgram = Annotated[
    int | None,
    option(metavar="N", help="No N tokens occur twice in an output; 0: off (default: the run's setting).", min=0),
]
MaxLength = Annotated[int | None, option(help="Maximum output length in tokens (default: the run's setting).", min=1)]
BatchTokens = Annotated[int | None, option(help="Source tokens per batch (default: the run's setting).", min=1)]
Memory = Annotated[
    int | None, option(help="Tokens that a model with a memory remembers (default: the run's setting).", min=0)
]
TopK = Annotated[int, Option(help="Sample from the k most likely tokens; 0 means all.", min=0)]
TopP = Annotated[float, Option(help="Sample from the most likely tokens of total probability p.", min=0.0, max=1.0)]
Seed = Annotated[int, Option(help="Random seed of sampling.", min=0)]
