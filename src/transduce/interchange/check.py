"""An exported model beside ours: the same random inputs through both, padding included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transduce.data.batch import Batch, collate
from transduce.data.objectives import Example
from transduce.errors import TransduceError
from transduce.text.special import EOS

LONGEST = 24
"""Tokens of the longest sentence that is tried."""

BOUND = 1e-4
"""The largest difference of a float32 logit or log-probability that an export may show."""

TEXTS = (
    "",
    "A dog runs.",
    " two  spaces ",
    "ﬁne “quotes” – ½ café",
    "漢字 😀 xyzzy",
    "a\tb",
    "1,000.50 €",
)
"""Strings that tokenizers disagree about, if anywhere."""


@dataclass(frozen=True, slots=True)
class Check:
    """What was compared, and the largest difference; None where nothing could be compared, and why."""

    what: str
    difference: float | None = None

    def line(self) -> str:
        """For people."""
        if self.difference is None:
            return f"not checked: {self.what}"
        return f"checked: {self.what}: largest difference {self.difference:.1e} (bound {BOUND:.0e})"


def examples(n_src: int, n_tgt: int, *, n: int = 12, longest: int = LONGEST, seed: int = 1) -> Batch:
    """Random sentences of ordinary ids, of several lengths, one token and the longest among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, longest, *torch.randint(1, longest + 1, (n - 2,), generator=generator).tolist()]

    def ids(length: int, n_ids: int) -> list[int]:
        return torch.randint(EOS + 1, n_ids, (length,), generator=generator).tolist()

    return collate([Example(ids(k, n_src), ids(lengths[-i], n_tgt)) for i, k in enumerate(lengths, 1)])


def logits_of(model: Any, batch: Batch) -> Tensor:
    """Our logits [B, T, V]."""
    with torch.no_grad():
        return model.logits(model(batch.src, batch.tgt_in)).float()


def settle(what: str, difference: float) -> Check:
    """The check; a difference over the bound is an error."""
    if not difference <= BOUND:
        raise TransduceError(
            f"the exported model is not the same: {what} differ by {difference:.2e}, more than {BOUND}"
        )
    return Check(what, difference)
