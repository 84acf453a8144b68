"""Output of benchmarks: rows of Markdown tables, OUT.md and OUT.svg."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def row(*cells: object) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def heading(*cells: object) -> list[str]:
    """The first two lines of a table."""
    return [row(*cells), "|---" * len(cells) + "|"]


def write(lines: list[str], plot: Callable[[Path], None], out: Path | None) -> None:
    """Print the lines; with `out`, write OUT.md too, and let `plot` write OUT.svg."""
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if out is not None:
        out.with_suffix(".md").write_text(text, encoding="utf-8")
        plot(out.with_suffix(".svg"))
