"""What a stored pair becomes in training: translation. Another objective is one more function in the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Ids = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class Example:
    """Ids of the two sides, without special ones; `collate` adds those."""

    src: Ids
    tgt: Ids


def translation(src: Ids, tgt: Ids) -> Example:
    """Read the source, write the target."""
    return Example(src=src, tgt=tgt)


OBJECTIVES: dict[str, Callable[[Ids, Ids], Example]] = {"translation": translation}
