"""What importers return and exporters get, and checks that both commands share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from transduce.config import Settings
from transduce.errors import SettingsError, UserError, nearest
from transduce.text.tokenizer import Tokenizers


@dataclass(frozen=True, slots=True, eq=False)
class Imported:
    """A model of another program in the form of a run folder; `notes` go into its card."""

    settings: Settings
    tokenizers: Tokenizers
    tensors: dict[str, Tensor]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """A run to be exported: `model`, in eval mode, has these settings and tensors."""

    settings: Settings
    tokenizers: Tokenizers
    tensors: Mapping[str, Tensor]
    model: Any  # of any architecture
    quantization: str | None = None


def known_or_nearest(name: str, known: Collection[str], option: str) -> None:
    """`SettingsError` for a name that is not known, with the nearest one that is."""
    if name not in known:
        raise SettingsError(f"{option} {name}{nearest(name, known)}; known: {', '.join(known)}")


def check_is_free(path: Path) -> None:
    """Refuse a place for a new folder that is taken; an empty folder is free."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} exists already; give another folder, or remove it")


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Create a folder with its parents; after an error, remove those that were created."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make {folder}: {error.strerror or error}") from None
        yield
    except BaseException:
        for path in missing:  # the innermost first
            with suppress(OSError):  # something else is in it by now
                path.rmdir()
        raise
