"""Base class of commands, the options that several commands share, and output to stdout and to files."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Protocol, Unpack

import typer
from typer import Argument, Option
from typer.core import TyperCommand

from transduce.config.decoding import DecodingKeywords, DecodingOptions, DecodingSettings
from transduce.errors import DataError, SettingsError, UserError
from transduce.logging import Log, escape
from transduce.runs.atomic import partial_of, write_aside

Parser = Callable[[str], Path] | None


def argument(metavar: str, help: str, *, parser: Parser = None) -> Any:
    """Declare an argument. Its help text already explains any default, so that typer must not append it."""
    return Argument(metavar=metavar, help=help, show_default=False, parser=parser)


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def option(help: str, *names: str, metavar: str | None = None, min: float | None = None, parser: Parser = None) -> Any:
    """Declare an option. Its help text already explains any default, so that typer must not append it."""
    return Option(*names, help=help, metavar=metavar, min=min, show_default=False, parser=parser)


def find_run(path: str) -> Path:
    """Find a run folder, or a model on the Hugging Face Hub, whose commit is printed on stderr. See `runs.hub`."""
    from transduce.runs import hub

    folder = hub.find_run(path)
    if folder != Path(path):
        Log().say(f"{path}: commit {folder.name} on the Hugging Face Hub")
    return folder


def file(help: str, *names: str) -> Any:
    return option(help, *names, metavar="FILE")


def folder(help: str) -> Any:
    return option(help, metavar="FOLDER")


def decoding_option(name: str, *flags: str) -> Any:
    """Declare an option for a field of `DecodingOptions`. The command's field must default to None, for unset."""
    field = DecodingOptions.model_fields[name]
    default = "the run's setting" if name in DecodingSettings.model_fields else field.default
    help = str(field.description).removesuffix(".") + ("" if field.annotation is bool else f" (default: {default})")
    return option(f"{help}.", *(flags or (flag_of(name),)))


Run = Annotated[Path, argument("RUN", "Run folder, or OWNER/NAME of one on the Hugging Face Hub.", parser=find_run)]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print warnings only.")]
Device = Annotated[str, Option(help="Device: auto, cpu or cuda.")]
Precision = Annotated[
    str, Option(help="Precision: float32, bfloat16, or on CPUs int8 or float32-fast (for CPUs with AMX).")
]
SrcLang = Annotated[
    str | None, Option("--src-lang", help="Source language, for a multilingual model (default: the run's).")
]
TgtLang = Annotated[
    str | None, Option("--tgt-lang", help="Target language, for a multilingual model (default: the run's).")
]
Ensemble = Annotated[
    list[Path] | None,
    option(
        "Translate together with this run, which needs the same vocabularies; repeatable.",
        metavar="RUN",
        parser=find_run,
    ),
]
Json = Annotated[bool, Option("--json", help="Print JSON, one object per line.")]
DataFolder = Annotated[Path | None, folder("Folder that data paths of recipes are relative to.")]
Overrides = Annotated[
    list[str] | None,
    option("Override a setting, e.g. training.lr=0.001; repeatable.", "--set", metavar="KEY=VALUE"),
]
Processes = Annotated[
    int,
    Option(help="Processes that train together on this machine, e.g. one per GPU; they share every batch.", min=1),
]
MaxRestarts = Annotated[
    int,
    Option(help="With --processes: resume from the last checkpoint this many times if a process is lost.", min=0),
]
Memory = Annotated[
    int | None, option("Tokens that a model with a memory remembers (default: the run's setting).", min=0)
]
Beam = Annotated[int | None, decoding_option("beam")]
LengthPenalty = Annotated[float | None, decoding_option("length_penalty")]
MaxLength = Annotated[int | None, decoding_option("max_length")]
NoRepeatNgram = Annotated[int | None, decoding_option("no_repeat_ngram")]
Temperature = Annotated[float | None, decoding_option("temperature")]
TopK = Annotated[int | None, decoding_option("top_k")]
TopP = Annotated[float | None, decoding_option("top_p")]
Split = Annotated[bool | None, decoding_option("split", "--split/--no-split")]
Seed = Annotated[int | None, decoding_option("seed")]

OPTIONS_FOR = (
    ("data.train", "--src and --tgt, --path, or --text"),
    ("data.valid", "--valid-src and --valid-tgt, or --valid-text"),
    ("data.test", "--test-src and --test-tgt, or --test-text"),
    ("data.root", "--data"),
    ("data.src_lang", "--src-lang"),
    ("data.tgt_lang", "--tgt-lang"),
    ("training.start", "--from"),
    ("tokenizer.extend", "--extend-vocabulary"),
    ("more", "--more-updates, --more-epochs, --more-minutes"),
    ("base", "--base RUN"),
    ("run", "--run FOLDER"),
    ("override", "--set KEY=VALUE"),
    ("output_dir", "--output-dir"),
    ("sample", "--sample"),
    ("n_best", "--nbest"),
    ("n_best", "--samples"),
    ("cut_prompt", "--cut-prompt"),
    ("new_key", "transduce serve --new-api-key NAME"),
)
"""The command-line options for settings and parameters that errors name (`UserError.names`)."""


class Command(ABC):
    """A command as a dataclass: its fields are the options, its docstring the help text."""

    @abstractmethod
    def execute(self) -> None:
        """Do the work of the command."""

    def decoding(self, *, without: Collection[str] = (), **fixed: Unpack[DecodingKeywords]) -> DecodingOptions:
        """Make decoding options from the command's fields of equal names, except `without`, and from fixed values."""
        names = [field.name for field in fields(self) if field.name in DecodingOptions.model_fields]  # type: ignore[arg-type]
        return DecodingOptions(**{name: getattr(self, name) for name in names if name not in without}, **fixed)


class TextCommand(TyperCommand):
    """Runs a command for typer. It requires UTF-8 in text arguments (not in paths), and adds options to errors."""

    def invoke(self, ctx: Any) -> None:  # a context of the copy of Click inside Typer
        """Run the function of the command, or the `Command` that it makes."""
        try:
            for value in ctx.params.values():
                for text in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(text, str):
                        _check_text(text)
            command = super().invoke(ctx)
            if isinstance(command, Command):
                command.execute()
        except UserError as error:
            error.args = (str(error) + self.describe_options(error.names),)
            raise

    def describe_options(self, names: Collection[str]) -> str:
        """Format the options for settings that an error names, such as " (training.start: --from)"."""
        known = {flag for parameter in self.params for flag in parameter.opts}
        described = [
            f"{name}: {flags}"
            for name, flags in OPTIONS_FOR
            if name in names and known.issuperset(word.strip(",") for word in flags.split() if word.startswith("--"))
        ]
        return f" ({'; '.join(described)})" if described else ""


def require_packages() -> None:
    """Raise `SettingsError` if a package that the service needs is not installed."""
    for name in ("granian", "prometheus_client", "python_multipart", "starlette"):
        if find_spec(name) is None:
            raise SettingsError(f"{name} is not installed; pip install 'transduce[serve]'")


def _check_text(text: str) -> None:
    """Raise `DataError` if an argument has lone surrogates, Python's form of bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        shown = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        raise DataError(
            f"argument '{shown}': not valid UTF-8 (at character {error.start + 1}); text must be UTF-8"
        ) from None


STDOUT = "standard output"


def print_lines(lines: Iterable[str], *, colours: bool = False) -> None:
    """Print lines to stdout. On a terminal, control characters are escaped.

    When the reader (head, less) closes the pipe, the command exits quietly and closes `lines`. `colours`: keep the
    background colours of attention pictures.
    """
    on_terminal = sys.stdout.isatty()
    try:
        for line in lines:
            _print(escape(line, colours=colours) if on_terminal else line)
        _print("", end="", flush=True)
    except BrokenPipeError:
        _drop_output()
        raise typer.Exit from None
    except OSError as error:
        if error.filename == STDOUT:
            _drop_output()
        raise
    finally:
        if isinstance(lines, Generator):
            lines.close()


def _drop_output() -> None:
    """Discard buffered output, which Python would otherwise flush at exit, with an error."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print(text: str, *, end: str = "\n", flush: bool = False) -> None:
    try:
        print(text, end=end, flush=flush)
    except OSError as error:
        error.filename = STDOUT
        raise


class Result(Protocol):
    """The result of a command, as lines for people and as plain data."""

    def lines(self) -> Iterable[str]: ...

    def to_json(self) -> Any: ...


def print_result(result: Result, *, as_json: bool) -> None:
    """Print a result for people, or as one line of JSON."""
    print_lines([to_json(result.to_json())] if as_json else result.lines())


def to_json(value: Any) -> str:
    """Format a value as one line of JSON without escaping text to ASCII."""
    return json.dumps(value, ensure_ascii=False)


def check_output(output: Path | None, *inputs: Path | None) -> None:
    """Raise `SettingsError` if the output is a folder or an input."""
    if output is not None and output.is_dir():
        raise SettingsError(f"--output {output} is a folder; name a file")
    given = {os.path.realpath(path) for path in inputs if path is not None}
    if output is not None and output.is_file() and os.path.realpath(output) in given:
        raise SettingsError(f"--output {output} is also an input, which it would replace; name another file")


def write_lines(output: Path, lines: Iterable[str]) -> None:
    """Write lines to a file, atomically. After an error, the lines before it remain in `output`.partial."""
    n = 0
    try:
        with write_aside(output, keep=True) as aside, aside.open("w", encoding="utf-8", newline="\n") as file:
            for line in lines:
                file.write(f"{line}\n")
                n += 1
    except BaseException:
        if n and (partial := partial_of(output)).exists():
            Log().warn(f"the lines before the error are in {partial}")
        raise
    Log().say(f"{n:,} lines are in {output}")
