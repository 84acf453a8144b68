"""Entry point: run a command and exit with its code.

0 done; 1 failed; 2 an error that the user can correct (one line on stderr, no traceback). After a signal, with
everything saved: 130 SIGINT (Ctrl-C), 143 SIGTERM, 129 SIGHUP.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence

try:
    import typer

    from transduce.cli.app import app
    from transduce.cli.options import print_lines
    from transduce.config.extensions import ALLOW
    from transduce.distributed.launch import this_process
    from transduce.errors import NEEDS_PYTORCH, RankExited, RankStuck, TransduceError, is_out_of_memory
    from transduce.logging import print_error, print_exception, print_to_stderr
    from transduce.process import collect_garbage_rarely, exit_with_parent, limit_spinning
except KeyboardInterrupt:  # Ctrl-C while modules are loaded
    sys.exit(130)

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code. Default of `arguments`: the arguments of the process.

    `--debug` or TRANSDUCE_DEBUG=1 also print tracebacks of errors. `--allow-code` allows the extensions of recipes and
    run folders to run.
    """
    _replace_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # for every locale, text is UTF-8 and lines end in \n
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    exit_with_parent()
    limit_spinning()
    collect_garbage_rarely()
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given or os.environ.get("TRANSDUCE_DEBUG", "0") not in ("", "0")
    if "--allow-code" in given:
        os.environ[ALLOW] = "1"  # for child processes too
    given = [argument for argument in given if argument not in ("--debug", "--allow-code")]  # allowed in any place
    try:
        code = app(given or ["--help"], prog_name="transduce", standalone_mode=False)
        with contextlib.suppress(typer.Exit):  # raised if the reader has closed the pipe
            print_lines(())  # flush
        if code == 130:  # Typer returns this after Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except (KeyboardInterrupt, Exception) as error:
        if (exit_code := _report(error, debug=debug)) is None:
            raise
        sys.exit(exit_code)


def _report(error: BaseException, *, debug: bool) -> int | None:
    """Print an error in one line and return the exit code; return None for a bug, whose traceback Python prints."""
    if isinstance(error, KeyboardInterrupt):
        print_to_stderr("transduce: interrupted")
        return 130
    if isinstance(error, TransduceError | typer.TyperException):
        if isinstance(error, RankExited) and not isinstance(error, RankStuck) and this_process().launched:
            return error.exit_code  # the launcher reports which rank failed
        if debug:
            print_exception(error)
        print_error(error.format_message() if isinstance(error, typer.TyperException) else str(error))
        return error.exit_code
    if isinstance(error, OSError):
        if debug:
            print_exception(error)
        where = f"{error.filename}: " if error.filename else ""
        print_error(f"{where}{error.strerror or error}")
        with contextlib.suppress(OSError, typer.Exit):
            print_lines(())  # drops output that cannot be written: Python would fail again at exit
        return 2 if error.errno in _DISK_FULL else 1
    if debug:
        return None
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "jaxtyping"):
        print_error(f"this command needs {NEEDS_PYTORCH}")
        return 2
    if is_out_of_memory(error):
        print_error(
            "out of memory; smaller batches may help: --set training.micro_batch_tokens=... for training, "
            "--batch-tokens for translation with PyTorch"
        )
        return 1
    return None


def _replace_closed_streams() -> None:
    """Connect closed standard streams (`2>&-`) to os.devnull, for child processes too.

    Output to stderr is lost. stdout is opened for reading only, so that lost output is an error.
    """
    for name, mode, flags in (
        ("stdin", "r", os.O_RDONLY),
        ("stdout", "w", os.O_RDONLY),
        ("stderr", "w", os.O_WRONLY),
    ):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, flags)  # gets the lowest free descriptor: the number of the closed stream
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


if __name__ == "__main__":
    main()
