"""The behaviour of attention heads: their weights, with labels by stated rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from transduce.inspection.arrays import pack
from transduce.inspection.parts import Part
from transduce.inspection.subjects import Side

RULES = {
    "previous token": "at least 40 % of the weight is on the token before",
    "next token": "at least 40 % of the weight is on the token after",
    "same token": "at least 40 % of the weight is on the token itself",
    "separator": "at least 40 % of the weight is on punctuation and special tokens",
    "alignment": "in cross-attention: the mean of each query's largest weight is at least 0.6",
    "broad": "the mean entropy of a query's weights is at least 0.8 of that of even weights",
    "mixed": "no rule holds",
    "share": (
        "the weight on such tokens, averaged over all queries. The two largest are shown: of the tokens named above, "
        "and of the one that gets most of the weight, if it is no separator. A token can count twice."
    ),
}
"""The labels of heads, with the rule of each; of several that hold, the one that is exceeded most counts."""
_LEAST = dict.fromkeys(RULES, 0.4) | {"alignment": 0.6, "broad": 0.8}


def _breadth(weights: np.ndarray) -> float:
    """Mean entropy of the rows over that of even weights, where there is more than one key."""
    allowed = (weights > 0).sum(1)
    weights, allowed = weights[allowed > 1], allowed[allowed > 1]
    entropy = -(weights * np.log(np.maximum(weights, 1e-12))).sum(1)
    return float((entropy / np.log(allowed)).mean()) if len(allowed) else 0.0


def label_head(weights: np.ndarray, keys: Side, *, is_cross: bool) -> dict[str, Any]:
    """The behaviour of a head with weights [T, S]: its label, the score of the label, and its two largest shares."""
    offsets = {} if is_cross else {"previous token": -1, "next token": 1, "same token": 0}
    shares = {name: float(weights.trace(offset) / len(weights)) for name, offset in offsets.items()}
    received = weights.mean(0)
    separators = [not any(c.isalnum() for c in token) or token[:1] == "<" for token in keys.tokens]
    shares["separator"] = float(received[separators].sum())
    scores = shares | {"broad": _breadth(weights)} | ({"alignment": float(weights.max(1).mean())} if is_cross else {})
    fitting = [label for label, score in scores.items() if score >= _LEAST[label]]
    label = max(fitting, key=lambda name: scores[name] - _LEAST[name], default="mixed")
    most = int(received.argmax())
    if not separators[most]:
        shares[f"“{keys.tokens[most]}”"] = float(received[most])
    largest = sorted(shares.items(), key=lambda item: -item[1])[:2]
    return {"label": label, "score": scores.get(label), "shares": [list(one) for one in largest]}


def attention_view(parts: Sequence[Part], sides: dict[str, Side]) -> Iterator[dict[str, Any]]:
    """All layers with attention weights, and what each head does."""
    for part in parts:
        found = part.values.get(f"{part.name}.weights")
        if found is None:
            continue
        assert found.rows is not None and found.columns is not None
        rows, columns = (
            _fitted(sides[side], n) for side, n in ((found.rows, found.shape[1]), (found.columns, found.shape[2]))
        )
        is_cross = found.rows != found.columns and found.columns == "src"
        stack = "relay" if part.kind.kind == "relay_attention" else "cross" if is_cross else part.stack
        yield {
            "name": part.name,
            "kind": stack,
            "layer": part.layer or 0,
            "rows": found.rows,
            "columns": found.columns,
            "row_tokens": rows.tokens,
            "column_tokens": columns.tokens,
            "weights": pack(found.array),
            "labels": [label_head(head, columns, is_cross=stack in ("cross", "relay")) for head in found.array],
        }


def _fitted(side: Side, n: int) -> Side:
    """A side with as many tokens as an axis: a star's memory begins with its relay node, which is one row too."""
    if len(side.tokens) == n:
        return side
    if n == 1:
        return Side("", (0,), ("relay",), (0,))
    tokens = ("relay", *side.tokens) if len(side.tokens) + 1 == n else tuple(f"{i}" for i in range(n))
    return Side(side.text, tuple(range(n)), tokens, tuple(range(n)))
