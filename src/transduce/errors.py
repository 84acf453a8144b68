"""The errors that a user can meet, each with the exit code that the command line answers with.

A user's mistake is told in one line: what was given, what is allowed, what to do. `assert` is for our own bugs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TransduceError(Exception):
    """Something failed that is not the user's mistake; the command exits with code 1."""

    exit_code = 1


class TrainingError(TransduceError):
    """A training run cannot go on (a loss that is not finite or explodes, a sentence that does not fit into memory)."""


class TooLong(TrainingError):
    """One sentence that does not fit into the memory of this process: others of the training do not know of it."""


class UserError(TransduceError):
    """The user can fix it; one line, no traceback, exit code 2."""

    exit_code = 2


class SettingsError(UserError):
    """A setting that is unknown, misspelt, out of range, or contradicts another."""


class VocabularyTooSmall(SettingsError):
    """A vocabulary that cannot even hold the characters of the text, which alone need `needed` pieces."""

    def __init__(self, message: str, *, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


class DataError(UserError):
    """Text that cannot be read or used; the message names the file and the line."""


class RunFolderError(UserError):
    """A run folder that is missing, damaged, of another run, or that cannot be written."""


class Interrupted(TransduceError):
    """A signal asked the run to stop: what was done is saved; the message says how to go on.

    The exit code is the shell's for that signal, 128 and its number: 130 SIGINT (Ctrl-C), 143 SIGTERM, 129 SIGHUP.
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
    "could not create a primitive",  # oneDNN, without memory for its kernel
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, PyTorch's CPU allocator, oneDNN or a GPU's allocator says that memory is at an end."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(mark in str(error).lower() for mark in _OUT_OF_MEMORY)
    )


class RankExited(TransduceError):
    """Another rank of the same training has exited."""


def nearest(given: str, allowed: Iterable[str]) -> str:
    """A hint to the allowed name nearest to a misspelt one: `; did you mean 'x'?`, or nothing.

    >>> nearest("droput", ["dropout", "d_model"])
    "; did you mean 'dropout'?"
    """
    close = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""
