"""Options that several commands share, each defined once. The options of a training are in `request.py`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from transduce.config.decoding import DecodingOptions, DecodingSettings

Command = Callable[..., None]


def argument(metavar: str, help: str) -> Any:
    """An argument without a default, or with one that its help text explains."""
    return Argument(metavar=metavar, help=help, show_default=False)


def flag_of(name: str) -> str:
    """The option for a parameter."""
    return f"--{name.replace('_', '-')}"


def option(*names: str, help: str, metavar: str | None = None, min: Any = None) -> Any:
    """An option without a default, or with one that its help text explains."""
    return Option(*names, help=help, metavar=metavar, min=min, show_default=False)


def replacing(
    name: str, options: Iterable[inspect.Parameter], build: Callable[..., object]
) -> Callable[[Command], Command]:
    """Replace the parameter `name` of a command by options, from whose values `build` makes its value."""
    options = list(options)

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def expanded(**given: Any) -> None:
            values = {one.name: given.pop(one.name) for one in options}
            command(**{name: build(**values)}, **given)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            parameters += options if parameter.name == name else [parameter]
        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
        expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return expanded

    return decorate


def expand(request: type) -> Callable[[Command], Command]:
    """Replace a command's parameter `request`, an object of this dataclass, by one option per field."""
    return replacing("request", inspect.signature(request, eval_str=True).parameters.values(), request)


def expand_decoding(
    *, without: Collection[str], flags: Mapping[str, str] = {}, fixed: Mapping[str, object] = {}
) -> Callable[[Command], Command]:
    """Replace a command's parameter `decoding`, its `DecodingOptions`, by one option per field that is not `without`.

    `flags`: others than the names of the fields. `fixed`: values of some fields, which are no options then.
    """
    fields = {name: one for name, one in DecodingOptions.model_fields.items() if name not in (*without, *fixed)}

    def option_of(name: str) -> inspect.Parameter:
        field = fields[name]
        default = "the run's setting" if name in DecodingSettings.model_fields else field.default
        help = str(field.description).removesuffix(".") + ("" if field.annotation is bool else f" (default: {default})")
        flag = option(flags.get(name, flag_of(name)), help=f"{help}.")
        kind = Annotated[field.annotation | None, flag]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)

    return replacing("decoding", map(option_of, fields), functools.partial(DecodingOptions, **fixed))


Run = Annotated[Path, argument("RUN", "Run folder.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print warnings only.")]
Device = Annotated[str, Option(help="Device: auto, cpu or cuda.")]
Precision = Annotated[
    str, Option(help="Precision: float32, bfloat16, or on CPUs int8 or float32-fast (for CPUs with AMX).")
]
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

MaxRestarts = Annotated[
    int,
    Option(help="With --processes: resume from the last checkpoint this many times if a process is lost.", min=0),
]

Memory = Annotated[
    int | None, option(help="Tokens that a model with a memory remembers (default: the run's setting).", min=0)
]
