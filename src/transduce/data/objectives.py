"""What a stored pair becomes in training: the source is read, the target written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Ids = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class Example:
    """Ids of the two sides, without special ones; `collate` adds those."""

    src: Ids
    tgt: Ids
