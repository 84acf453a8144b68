"""Errors for users, each with the exit code of the command line.

A user's mistake is reported in one line that says what was given, what is allowed and what to do. `assert` is for bugs
of transduce itself.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
from collections.abc import Collection, Iterable, Iterator, Sequence

NEEDS_PYTORCH = "PyTorch, which is not installed: pip install 'transduce[train]'"


class TransduceError(Exception):
    """A failure that is not the user's mistake; exit code 1."""

    exit_code = 1


class TrainingError(TransduceError):
    """Training cannot continue: the loss is not finite, or a single sentence does not fit into memory."""


class TooLong(TrainingError):
    """A single sentence does not fit into the memory of one rank, which reports it, as other ranks cannot see it."""


class RankExited(TransduceError):
    """Another rank of the same training has exited."""

    exit_code = 76


class RankStuck(RankExited):
    """Another rank did not answer within `training.timeout`; raised in one rank, which reports it."""


class UserError(TransduceError):
    """A mistake that the user can correct; reported in one line without a traceback, exit code 2.

    `names`: names of settings and parameters in the message, for which a command adds its options to the message.
    """

    exit_code = 2

    def __init__(self, message: str, *names: str) -> None:
        super().__init__(message)
        self.names = names


class SettingsError(UserError):
    """A setting that is unknown, misspelt, out of range, or contradicts another setting."""


class VocabularyTooSmall(SettingsError):
    """A vocabulary size that is too small for the characters of the text, which need `needed` pieces."""

    def __init__(self, message: str, *, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


class DataError(UserError):
    """Text that cannot be read or used; the message names the file and the line."""


class RunFolderError(UserError):
    """A run folder that is missing or damaged, belongs to another run, or cannot be written."""


class FolderInUse(RunFolderError):
    """A folder that is in use by another process."""


class Interrupted(TransduceError):
    """A signal stopped the run after everything was saved; the message says how to resume.

    The exit code is the shell's for that signal, 128 plus its number: 130 SIGINT (Ctrl-C), 143 SIGTERM, 129 SIGHUP.
    """

    def __init__(self, message: str, *, signal: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal


_OUT_OF_MEMORY = (
    "allocate memory",
    "out of memory",
    "out_of_memory",
    "not enough memory",
    "bad_alloc",
    "status_alloc_failed",  # cuBLAS, cuDNN before version 9, cuSPARSE
    "allocation_failed",  # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_{HOST,DEVICE}_ALLOCATION_FAILED
    "could not create a primitive",  # oneDNN, without memory for its kernel
)


def cannot_write(path: object, error: OSError) -> RunFolderError:
    hint = "; free some space and run the same command again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return RunFolderError(f"cannot write {path}: {error.strerror or error}{hint}")


@contextlib.contextmanager
def needing(extra: str, problem: str) -> Iterator[None]:
    """Context manager for imports: if a package is missing, raise `SettingsError` with `problem` and the extra."""
    try:
        yield
    except ImportError as error:
        raise SettingsError(f"{problem}: pip install 'transduce[{extra}]'") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, PyTorch, oneDNN, a CUDA library or the system ran out of memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(mark in str(error).lower() for mark in _OUT_OF_MEMORY)
    )


def message_of(error: BaseException) -> str:
    return " ".join(str(error).split())


def listed(names: Sequence[str], most: int = 1000) -> str:
    """Join up to `most` names in one line, each cut at 200 characters, and add the number of names left out."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(name if len(name) <= 200 else f"{name[:200]}…" for name in names[:most]) + more


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return a hint with the allowed name nearest to a misspelt one, `; did you mean 'x'?`, or an empty string.

    >>> nearest("droput", ["dropout", "d_model"])
    "; did you mean 'dropout'?"
    """
    close = difflib.get_close_matches(given[:100], list(allowed), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def check_known(setting: str, name: str, known: Collection[str]) -> None:
    """Raise `SettingsError` with the nearest known name if `name`, the value of a setting, is not in `known`."""
    if name not in known:
        raise SettingsError(f"{setting} = '{name}'{nearest(name, known)}; allowed: {', '.join(known)}")
