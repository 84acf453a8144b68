"""The application of the command line, and the table of all commands.

A command is a function with one parameter per option, or a class with one field per option. Commands import heavy
modules when they run, so that `--help` is instant.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Annotated

import typer
from typer import Option

from transduce.cli.convert import export_model, import_model, push
from transduce.cli.evaluate import Compare, Distill, Evaluate
from transduce.cli.options import Command, TextCommand
from transduce.cli.serve import Inspect, Serve
from transduce.cli.train import Doctor, Prepare, Train, demo, report, verify
from transduce.cli.translate import Align, Generate, Score, Translate, classify, fill

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
    """Describe the engine that decodes on CPUs, with its instruction set, or why it is not the native library."""
    from transduce.kernels.library import instruction_set, load_library

    library = load_library()
    if not isinstance(library, str):
        return f"native library, {instruction_set()}"
    if find_spec("torch") is None:
        return f"none: {library}, and PyTorch is not installed"
    import torch

    return f"PyTorch, {torch.backends.cpu.get_cpu_capability().lower()} ({library})"


@app.callback()
def _all(
    debug: Annotated[
        bool, Option("--debug", help="Print a traceback with every error (or TRANSDUCE_DEBUG=1).")
    ] = False,
    allow_code: Annotated[
        bool, Option("--allow-code", help="Run the Python files that a recipe or a run names as extensions.")
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


COMMANDS: dict[str, Callable[..., Command | None]] = {
    "demo": demo,
    "train": Train,
    "prepare": Prepare,
    "doctor": Doctor,
    "translate": Translate,
    "evaluate": Evaluate,
    "generate": Generate,
    "fill": fill,
    "classify": classify,
    "score": Score,
    "align": Align,
    "inspect": Inspect,
    "report": report,
    "verify": verify,
    "compare": Compare,
    "serve": Serve,
    "distill": Distill,
    "import": import_model,
    "export": export_model,
    "push": push,
}
for _name, _command in COMMANDS.items():
    app.command(_name, cls=TextCommand)(_command)
