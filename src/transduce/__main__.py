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

    from transduce.cli.app import app, options_of
    from transduce.cli.output import print_lines
    from transduce.cli.request import with_flags
    from transduce.distributed.environment import this_process
    from transduce.errors import RankExited, RankStuck, TransduceError, is_out_of_memory
    from transduce.logging import print_error, print_exception, print_to_stderr
    from transduce.process import collect_garbage_rarely, exit_with_parent, limit_spinning
except KeyboardInterrupt:  # Ctrl-C while modules are loaded
    sys.exit(130)

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code; `--debug` or TRANSDUCE_DEBUG=1 print tracebacks of errors too."""
    _replace_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # whatever the locale: text is UTF-8 and lines end in \n
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    exit_with_parent()
    limit_spinning()
    collect_garbage_rarely()
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given or os.environ.get("TRANSDUCE_DEBUG", "0") not in ("", "0")
    given = [argument for argument in given if argument != "--debug"]  # allowed before and after the command's name
    try:
        code = app(given or ["--help"], prog_name="transduce", standalone_mode=False)
        with contextlib.suppress(typer.Exit):  # the reader has closed the pipe
            print_lines(())  # flush
        if code == 130:  # typer's answer to a Ctrl-C that nothing else has caught
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except KeyboardInterrupt:
        print_to_stderr("transduce: interrupted")
        sys.exit(130)
    except RankExited as error:
        if this_process().launched and not isinstance(error, RankStuck):  # the launcher reports which rank failed
            sys.exit(error.exit_code)
        print_error(str(error))
        sys.exit(error.exit_code)
    except (TransduceError, typer.TyperException) as error:
        if debug:
            print_exception(error)
        if isinstance(error, typer.TyperException):
            print_error(error.format_message())
        else:
            print_error(with_flags(str(error), options_of(given)))
        sys.exit(error.exit_code)
    except OSError as error:
        if debug:
            print_exception(error)
        where = f"{error.filename}: " if error.filename else ""
        print_error(f"{where}{error.strerror or error}")
        with contextlib.suppress(OSError, typer.Exit):
            print_lines(())  # drops what cannot be written: Python would fail again at exit
        sys.exit(2 if error.errno in _DISK_FULL else 1)
    except (MemoryError, RuntimeError) as error:
        if debug or not is_out_of_memory(error):
            raise
        print_error(
            "out of memory; smaller batches may help: --set training.micro_batch_tokens=... for training, "
            "--batch-tokens for translation with PyTorch"
        )
        sys.exit(1)


def _replace_closed_streams() -> None:
    """Connect the standard streams that are closed (`2>&-`) to os.devnull, for child processes too.

    What is written to stderr is lost. stdout is open for reading only, so that lost output is an error.
    """
    for name, mode, flags in (
        ("stdin", "r", os.O_RDONLY),
        ("stdout", "w", os.O_RDONLY),
        ("stderr", "w", os.O_WRONLY),
    ):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, flags)  # the number of the closed one, which is free
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


if __name__ == "__main__":
    main()
