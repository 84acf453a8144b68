"""Tokens that search and sampling may choose: forced prefixes, lists of allowed tokens, and no repeated n-grams."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from transduce.data.batch import pad_rows
from transduce.text.special import PAD


def pad_prefixes(prefixes: Sequence[Sequence[int]] | None, src: Tensor) -> Int[Tensor, "B P"]:
    """The forced tokens of each sentence and place, 0 (padding) where any may come."""
    return pad_rows(prefixes or [()] * len(src)).to(src.device)


def pad_lists(lists: Sequence[np.ndarray | None] | None, src: Tensor) -> Int[Tensor, "B A"]:
    """The allowed tokens of each sentence, the last one repeated; padding where all are."""
    rows = [[PAD] if row is None else row for row in lists or []]
    most = max(map(len, rows), default=0)
    padded = [np.pad(row, (0, most - len(row)), mode="edge") for row in rows]
    return torch.from_numpy(np.array(padded, np.int64).reshape(len(src), most)).to(src.device)


def repeating_tokens(ids: Int[Tensor, "*N T"], n: int) -> Int[Tensor, "*N w"]:
    """The tokens after which an n-gram of `ids` would occur a second time, and padding.

    >>> repeating_tokens(torch.tensor([5, 6, 7, 5, 6]), 3).tolist()
    [7, 0, 0]
    """
    if ids.shape[-1] < n:
        return ids[..., :0]
    grams = ids.unfold(-1, n, 1)  # [*N, w, n]
    last = ids[..., ids.shape[-1] - n + 1 :]
    return grams[..., -1].masked_fill((grams[..., :-1] != last[..., None, :]).any(-1), PAD)


def keep_tokens(known: Float[Tensor, "N V"], tokens: Int[Tensor, "N A"]) -> Float[Tensor, "N V"]:
    """Rows with -inf for all but some tokens; rows where these are padding stay as they are."""
    others = torch.ones_like(known, dtype=torch.bool).scatter_(1, tokens, False)
    return known.masked_fill(others & (tokens[:, :1] != PAD), -math.inf)
