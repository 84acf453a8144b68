"""What was found: one line for people, numbers for programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["obstacle", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth saying. An obstacle keeps training from working or from being worth it; a warning does not.

    `text` says what was found and where, `advice` what to do; `figures` are what was measured.
    """

    check: str
    level: Level
    text: str
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """Both in one line."""
        return f"{self.text}; {self.advice}" if self.advice else self.text

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "check": self.check,
            "level": self.level,
            "text": self.text,
            "advice": self.advice,
            "figures": self.figures,
        }


def about(count: float) -> str:
    """A number that is an estimate, in three digits.

    >>> about(1234567), about(12.3)
    ('about 1,230,000', 'about 12')
    """
    count = round(count)
    digits = len(str(abs(count)))
    return f"about {round(count, 3 - digits if digits > 3 else 0):,}"


def percent(share: float) -> str:
    """A share, with a digit behind the point where it is small.

    >>> percent(0.5), percent(0.013), percent(0.0004)
    ('50 %', '1.3 %', '0.04 %')
    """
    return f"{100 * share:.{0 if share >= 0.1 or not share else 1 if share >= 0.001 else 2}f} %"
