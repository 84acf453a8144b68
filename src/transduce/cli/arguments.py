"""What every command refuses of its arguments, whatever they are for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typer

from transduce.errors import DataError


def take_text_only(app: typer.Typer) -> None:
    """Have every command of an app refuse text that is not UTF-8. Paths may hold any bytes, as file names do."""
    for command in app.registered_commands:
        assert command.callback is not None
        command.callback = _checked(command.callback)


def _checked(command: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(command)
    def checked(**given: Any) -> Any:
        for value in given.values():
            for text in value if isinstance(value, list | tuple) else [value]:
                if isinstance(text, str):
                    _check_text(text)
        return command(**given)

    return checked


def _check_text(text: str) -> None:
    """Python hands on a byte 0xNN of an argument that is not UTF-8 as the half surrogate U+DCNN."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        shown = "".join(f"\\x{ord(c) - 0xDC00:02x}" if "\udc80" <= c <= "\udcff" else c for c in text)
        raise DataError(
            f"argument '{shown}': not valid UTF-8 (at character {error.start + 1}); text is taken in UTF-8 only"
        ) from None
