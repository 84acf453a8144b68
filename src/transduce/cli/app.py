"""The command line: every command with its name. Commands import heavy modules when they run, so `--help` is instant.

A command has one parameter per option, which can be more than eight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer
from typer import Option

from transduce.cli.align import align
from transduce.cli.compare import compare
from transduce.cli.convert import export_model, import_model
from transduce.cli.demo import demo
from transduce.cli.distill import distill
from transduce.cli.evaluate import evaluate
from transduce.cli.inspect import inspect
from transduce.cli.serve import serve
from transduce.cli.shortlist import shortlist
from transduce.cli.text import classify, fill, generate
from transduce.cli.train import doctor, prepare, report, train, verify
from transduce.cli.translate import score, translate
from transduce.errors import DataError

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> bool:
    if asked:
        import transduce

        print(f"transduce {transduce.__version__}")
        print(f"decoding on CPUs: {_describe_engine()}")
        raise typer.Exit
    return asked


def _describe_engine() -> str:
    """The engine that decodes on CPUs and its instruction set, and the reason if it is not the native library."""
    from transduce.native.library import instruction_set, load_library

    library = load_library()
    if not isinstance(library, str):
        return f"native library, {instruction_set()}"
    import torch

    return f"PyTorch, {torch.backends.cpu.get_cpu_capability().lower()} ({library})"


@app.callback()
def _all(
    debug: Annotated[
        bool, Option("--debug", help="Print a traceback with every error (or TRANSDUCE_DEBUG=1).")
    ] = False,
    version: Annotated[
        bool,
        Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version, and the engine that decodes."
        ),
    ] = False,
) -> None:
    """Train, run and inspect Transformers: raw parallel text in, a translator out.

    \b
    transduce demo                                      first run, built-in text
    transduce train --src a.en --tgt a.de --run runs/x  train on your own text
    echo "A dog." | transduce translate runs/x
    """


def options_of(arguments: Collection[str]) -> set[str]:
    """The options of the command that is the first of the arguments that name one."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # a group
    command = next((commands[one] for one in arguments if one in commands), None)
    return {name for parameter in command.params for name in parameter.opts} if command is not None else set()


def _with_checked_text(command: Callable[..., Any]) -> Callable[..., Any]:
    """Make a command refuse text arguments that are not UTF-8. Paths may contain any bytes."""

    @functools.wraps(command)
    def checked(**given: Any) -> Any:
        for value in given.values():
            for text in value if isinstance(value, list | tuple) else [value]:
                if isinstance(text, str):
                    _check_text(text)
        return command(**given)

    return checked


def _check_text(text: str) -> None:
    """Refuse the half surrogates as which Python passes bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        shown = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        raise DataError(
            f"argument '{shown}': not valid UTF-8 (at character {error.start + 1}); text must be UTF-8"
        ) from None


for _command in (
    *(
        demo,
        train,
        prepare,
        doctor,
        translate,
        evaluate,
        generate,
        fill,
        classify,
        score,
        align,
        inspect,
        report,
        verify,
    ),
    *(compare, serve, distill, shortlist, import_model, export_model),
):
    app.command(_command.__name__.removesuffix("_model"))(_with_checked_text(_command))
