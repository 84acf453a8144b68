"""The Star-Transformer (Guo et al. 2019) in NumPy, float64, written from the paper's equations alone.

Slow and simple on purpose: one sentence, one token and one head at a time, no dropout. Numbers in brackets are sections
of *Star-Transformer*. Weights are a flat mapping; a matrix is [out, in] as in y = W x + b.

    N.{satellite,relay}.{query,key,value,output}.{weight,bias}
    N.{satellite,relay}_norm.{weight,bias}
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = Mapping[str, Array]


def affine(x: Array, weights: Weights, at: str) -> Array:
    return weights[f"{at}.weight"] @ x + weights[f"{at}.bias"]


def multi_att(query: Array, context: list[Array], weights: Weights, at: str, n_heads: int) -> tuple[Array, Array]:
    """MultiAtt(q, H) = (a_1 + ... + a_k) W^O of one query [3.1, equations 2, 3], and the weights [heads, context]."""
    q = np.split(affine(query, weights, f"{at}.query"), n_heads)
    keys = [np.split(affine(c, weights, f"{at}.key"), n_heads) for c in context]
    values = [np.split(affine(c, weights, f"{at}.value"), n_heads) for c in context]
    heads, maps = [], []
    for i in range(n_heads):
        scores = np.array([q[i] @ key[i] / np.sqrt(len(q[i])) for key in keys])
        a = np.exp(scores - scores.max())
        a /= a.sum()
        heads.append(sum(a_j * value[i] for a_j, value in zip(a, values, strict=True)))
        maps.append(a)
    return affine(np.concatenate(heads), weights, f"{at}.output"), np.array(maps)


def update(x: Array, weights: Weights, at: str) -> Array:
    """LayerNorm(ReLU(x)) [3.2, equations 6 and 8]."""
    x = np.maximum(x, 0)
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * weights[f"{at}.weight"] + weights[f"{at}.bias"]


def star(e: Array, weights: Weights, n_heads: int, n_rounds: int) -> tuple[Array, Array]:
    """The satellite nodes [n, D] and the relay node [D] after all rounds, of embedded tokens e [3.2]."""
    n, h, s = len(e), list(e), e.mean(0)
    for t in range(n_rounds):
        context = [[h[(i - 1) % n], h[i], h[(i + 1) % n], e[i], s] for i in range(n)]
        h = [
            update(multi_att(h[i], context[i], weights, f"{t}.satellite", n_heads)[0], weights, f"{t}.satellite_norm")
            for i in range(n)
        ]
        s = update(multi_att(s, [s, *h], weights, f"{t}.relay", n_heads)[0], weights, f"{t}.relay_norm")
    return np.array(h), s


def from_layers(known: Mapping[str, Array], prefix: str = "blocks.") -> dict[str, Array]:
    """The names above for the weights of `nn.star.StarEncoder`."""
    weights: dict[str, Array] = {}
    for name, weight in known.items():
        if name.startswith(prefix):
            at, kind = name.removeprefix(prefix).replace("_attention", "").rsplit(".", 1)
            if at.endswith(".key_value"):
                owner = at.removesuffix("key_value")
                weights[f"{owner}key.{kind}"], weights[f"{owner}value.{kind}"] = np.split(weight, 2)
            else:
                weights[f"{at}.{kind}"] = weight
    return weights
