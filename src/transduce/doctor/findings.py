"""A finding of the doctor: one line for people, figures for programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["obstacle", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check. An obstacle makes training fail or pointless; a warning does not.

    `text` says what was found and where, `advice` what to do, `figures` are the measurements.
    """

    check: str
    level: Level
    text: str
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """Text and advice in one line."""
        return f"{self.text}; {self.advice}" if self.advice else self.text


def note_or_warning(is_serious: bool, check: str, text: str, advice: str, figures: dict[str, Any]) -> Finding:
    """A warning with advice if it `is_serious`, else a note without."""
    return Finding(check, "warning" if is_serious else "note", text, advice if is_serious else "", figures)


def percent(share: float) -> str:
    """Format a fraction, with more digits if it is small.

    >>> percent(0.5), percent(0.013), percent(0.0004)
    ('50 %', '1.3 %', '0.04 %')
    """
    return f"{100 * share:.{0 if share >= 0.1 or not share else 1 if share >= 0.001 else 2}f} %"


def size(n_bytes: float) -> str:
    """Format a number of bytes.

    >>> size(3 * 2**30), size(5e6)
    ('3.0 GiB', '5 MiB')
    """
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"
