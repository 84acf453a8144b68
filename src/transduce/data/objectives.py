"""Training examples: a sentence pair for translation, a row of running text for language modelling."""

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
    """The ids of a row of text, and the target at each position; `PAD` where there is none."""

    ids: Ids
    targets: Ids


def causal(row: np.ndarray, draw: np.random.Generator) -> RowExample:
    """Predict every token from those before it (Radford et al. 2018). Uses no random numbers.

    The beginning of a document is not a target: it would be predicted from the end of another document.
    """
    targets = np.asarray(row[1:], dtype=np.int64)
    return RowExample(row[:-1], np.where(targets == BOS, PAD, targets))
