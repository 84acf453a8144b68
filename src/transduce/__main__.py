"""The entry: runs a command and leaves with its exit code.

0 done; 1 the run failed; 2 the user can fix it (one line on stderr, never a traceback); a signal ended it, all saved:
130 SIGINT (Ctrl-C), 143 SIGTERM, 129 SIGHUP.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence

import typer

from transduce.cli.app import app
from transduce.distributed.environment import LOST, this_place
from transduce.errors import RankExited, TransduceError, is_out_of_memory
from transduce.process import exit_with_parent

LONGEST = 2000
"""Characters of an error."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and leave with its exit code; errors are one line on stderr unless debugging was asked for."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # whatever the locale: text is UTF-8, and a line ends in \n
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    exit_with_parent()
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given or os.environ.get("TRANSDUCE_DEBUG", "0") not in ("", "0")
    given = [argument for argument in given if argument != "--debug"]  # welcome before and after the command's name
    try:
        code = app(given or ["--help"], prog_name="transduce", standalone_mode=False)
        sys.stdout.flush()
        if code == 130:  # how typer answers a Ctrl-C that nothing else has caught
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except KeyboardInterrupt:
        print("transduce: interrupted", file=sys.stderr)
        sys.exit(130)
    except RankExited as error:
        place = this_place()
        if place.meeting is None:  # nobody else will tell
            print(f"transduce: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code if place.meeting is None else LOST)
    except (TransduceError, typer.TyperException) as error:
        if debug:
            traceback.print_exc()
        message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        print(f"transduce: error: {_one_line(message)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if debug:
            traceback.print_exc()
        where = f"{error.filename}: " if error.filename else ""
        print(f"transduce: error: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(2 if error.errno in _DISK_FULL else 1)
    except (MemoryError, RuntimeError) as error:
        if debug or not is_out_of_memory(error):
            raise
        print(
            "transduce: error: out of memory; smaller batches may help: --set training.micro_batch_tokens=... in "
            "training, --batch-tokens in translation",
            file=sys.stderr,
        )
        sys.exit(1)


def _one_line(message: str) -> str:
    """A message for people: on one line, the middle of a very long one left out."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(message.split()))  # names may hold anything
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} [...] {text[-LONGEST // 2 :]}"


if __name__ == "__main__":
    main()
