"""An exported model beside ours: the same random inputs through both, padding included."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transduce.config import EncoderSettings
from transduce.convert.vocabulary import NEVER
from transduce.data.batch import Batch, collate
from transduce.data.encoder_batch import pad_rows
from transduce.data.objectives import Example
from transduce.data.sentence_pairs import pack
from transduce.errors import TransduceError
from transduce.models.masked_lm import MaskedLM, PooledEncoder
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


Difference = tuple[float, float]
"""The largest difference, and the largest number compared."""


@dataclass(frozen=True, slots=True)
class Check:
    """What was compared, and the largest difference; None where nothing could be compared, and why."""

    what: str
    difference: float | None = None
    bound: float = BOUND

    def line(self) -> str:
        """For people."""
        if self.difference is None:
            return f"not checked: {self.what}"
        return f"checked: {self.what}: largest difference {self.difference:.1e} (bound {self.bound:.0e})"


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


def text_examples(s: EncoderSettings, n_ids: int, *, n: int = 12, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random texts and pairs of texts in their frame, ids and segments [B, S], padded: the shortest and the longest
    among them that are tried.
    """
    longest = min(LONGEST, s.max_positions) - 3  # what the frame of a pair leaves
    generator = torch.Generator().manual_seed(seed)

    def ids(at_most: int) -> list[int]:
        length = int(torch.randint(1, max(at_most, 1) + 1, (), generator=generator))
        return torch.randint(EOS + 1, n_ids, (length,), generator=generator).tolist()

    rows = [pack([]), pack(ids(1) * max(longest, 1))]
    rows += [pack(ids(longest // 2), ids(longest // 2) if s.n_segments > 1 and i % 2 else None) for i in range(n - 2)]
    return pad_rows([row.ids for row in rows]), pad_rows([row.segments for row in rows])


def outputs_of(model: Any, ids: Tensor, segments: Tensor) -> dict[str, Tensor]:
    """What the heads of an encoder alone give; per-token values [B, S, ...], those of the whole [B, ...]."""
    with torch.no_grad():
        if isinstance(model, MaskedLM):
            hidden, follows = model(ids, segments, torch.arange(ids.numel()))
            told = {"logits": model.logits(hidden).view(*ids.shape, -1)}
            return told if follows is None else told | {"next_sentence": follows}
        if isinstance(model, PooledEncoder):
            return dict(zip(("hidden", "pooled"), model(ids, segments), strict=True))
        return {"logits": model(ids, segments)}


def compare(found: Tensor, ours: Tensor) -> Difference:
    """The largest difference, and the largest number compared. What ours rules out need only be ruled out there."""
    real = ours > NEVER / 2
    if not bool((found[~real] <= NEVER / 2).all()):
        return math.inf, 0.0
    apart = (found - ours)[real].abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return float(apart.max()), float(ours[real].abs().max())


def compare_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> Difference:
    """The same of many pairs (found, ours)."""
    differences, sizes = zip(*(compare(found, ours) for found, ours in pairs), strict=True)
    return max(differences), max(sizes)


def settle(what: str, found: Difference) -> Check:
    """The check of what `compare` told; a difference over the bound is an error.

    The bound is for logits up to 32; beyond, float32 itself is that much coarser.
    """
    difference, size = found
    bound = BOUND * max(1.0, size / 32)
    if not difference <= bound:
        raise TransduceError(
            f"the exported model is not the same: {what} differ by {difference:.2e}, more than {bound:.1g}"
        )
    return Check(what, difference, bound)
