"""Runs that are trained once and used by the tests of all xdist workers, none of which changes them."""

from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def build_once(folder: Path, build: Callable[[Path], object]) -> Path:
    """Call `build(folder)` in the first worker that needs the folder; the others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    complete = Path(f"{folder}.complete")
    with FileLock(f"{folder}.lock"):
        if not complete.exists():
            build(folder)
            complete.touch()
    return folder
