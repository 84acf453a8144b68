"""What stored ids become in training: a pair for translation, a row of running text for language modelling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transduce.text.tokenizer import BOS, PAD

Ids = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class Example:
    """Ids of the two sides, without special ones; `collate` adds those."""

    src: Ids
    tgt: Ids


@dataclass(frozen=True, slots=True)
class RowExample:
    """Ids of a row of text, and beside each what the model should say there; `PAD` where nothing is asked for."""

    ids: Ids
    targets: Ids


def causal(row: np.ndarray, draw: np.random.Generator) -> RowExample:
    """Every token but the first is to be told from those before it (Radford et al. 2018). Draws nothing.

    The beginning of a document is not asked for: it would be guessed from another document's end.
    """
    targets = np.asarray(row[1:], dtype=np.int64)
    return RowExample(row[:-1], np.where(targets == BOS, PAD, targets))
