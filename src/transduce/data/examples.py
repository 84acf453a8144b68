"""Examples of batches, before they are tensors. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Ids = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class Example:
    """A sentence pair: ids of the two sides, without special ones; `collate` adds those.

    links: [n, 2], a source token and the target token that it is linked to, for guided alignment.
    """

    src: Ids
    tgt: Ids
    links: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class RowExample:
    """The ids of a row of text, and the target at each position; `PAD` where there is none."""

    ids: Ids
    targets: Ids
