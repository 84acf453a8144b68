"""Transformer-XL in float64 NumPy, from the equations of Dai et al. 2019 (section 3), one query and one key at a time.

Independent of the package: it shares only the names of weights, as `weights_of` makes them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oracle.numpy_transformer import ACTIVATIONS, NORMS, Array, softmax

Ids = NDArray[np.int64]
Weights = Mapping[str, Array]


@dataclass(frozen=True)
class Options:
    """The options that the equations depend on. `longest`: distances above count as this."""

    n_heads: int
    n_layers: int
    longest: int
    residual: str = "post"
    norm: str = "layer"
    norm_epsilon: float = 1e-5
    activation: str = "relu"
    feed_forward: str = "plain"
    scale_embeddings: bool = True


def position(distance: int, d_model: int) -> Array:
    """R_distance: the sinusoids of Vaswani et al. 2017 (section 3.5), of a distance in place of a position."""
    angles = [distance / 10000 ** ((column - column % 2) / d_model) for column in range(d_model)]
    return np.array([math.cos(a) if column % 2 else math.sin(a) for column, a in enumerate(angles)])


def score(i: int, j: int, query: Array, key: Array, w_r: Array, u: Array, v: Array, longest: int) -> float:
    """The attention score of one head for the query at position i and the key at position j <= i: four terms.

    A_ij = (a) q_i k_j + (b) q_i W_R R_(i-j) + (c) u k_j + (d) v W_R R_(i-j), divided by sqrt(d_head).
    """
    relative = w_r @ position(min(i - j, longest), w_r.shape[1])
    terms = (query @ key, query @ relative, u @ key, v @ relative)
    return float(sum(terms)) / math.sqrt(len(query))


def attention(x: Array, memory: Array, weights: Weights, at: str, o: Options) -> Array:
    """All heads for a segment x [T, D] after its memory [M, D], projected by W^O."""
    known = np.concatenate([memory, x])
    q, k, v = (weights[f"{at}.{name}"] for name in ("query", "key", "value"))
    w_r, n = weights[f"{at}.distance"], len(memory)
    d_head = q.shape[0] // o.n_heads
    result = np.zeros((len(x), q.shape[0]))
    for head in range(o.n_heads):
        rows = slice(head * d_head, (head + 1) * d_head)
        u, bias_v = weights["u"][rows], weights["v"][rows]
        for i in range(len(x)):
            query = q[rows] @ x[i]
            scores = [
                score(n + i, j, query, k[rows] @ known[j], w_r[rows], u, bias_v, o.longest) for j in range(n + i + 1)
            ]
            share = softmax(np.array(scores))
            result[i, rows] = sum(a * (v[rows] @ known[j]) for j, a in enumerate(share))
    return result @ weights[f"{at}.output"].T


def feed_forward(x: Array, weights: Weights, at: str, o: Options) -> Array:
    """Two layers with an activation between them; gated: the activation of one product times another."""
    f = ACTIVATIONS[o.activation]
    inner = x @ weights[f"{at}.expand"].T + weights.get(f"{at}.expand_bias", 0.0)
    if o.feed_forward == "gated":
        gate, value = np.split(inner, 2, axis=1)
        inner = f(gate) * value
    else:
        inner = f(inner)
    return inner @ weights[f"{at}.contract"].T + weights.get(f"{at}.contract_bias", 0.0)


def norm(x: Array, weights: Weights, at: str, o: Options) -> Array:
    """Of each position."""
    return NORMS[o.norm](x, weights[f"{at}.weight"], weights.get(f"{at}.bias", np.float64(0)), o.norm_epsilon)


def segment(x: Array, memory: list[Array], weights: Weights, o: Options) -> tuple[Array, list[Array]]:
    """The last layer's output for an embedded segment [T, D], and the input of each layer's attention [T, D].

    `memory`: such inputs of earlier segments, [M, D] per layer.
    """
    inputs = []
    for n in range(o.n_layers):
        at = f"{n}"
        y = norm(x, weights, f"{at}.attention_norm", o) if o.residual == "pre" else x
        inputs.append(y)
        x = x + attention(y, memory[n], weights, f"{at}.attention", o)
        x = norm(x, weights, f"{at}.attention_norm", o) if o.residual == "post" else x
        y = norm(x, weights, f"{at}.feed_forward_norm", o) if o.residual == "pre" else x
        x = x + feed_forward(y, weights, f"{at}.feed_forward", o)
        x = norm(x, weights, f"{at}.feed_forward_norm", o) if o.residual == "post" else x
    return (norm(x, weights, "norm", o) if o.residual == "pre" else x), inputs


def language_model(ids: Ids, weights: Weights, o: Options, *, segment_length: int, memory_length: int) -> Array:
    """Logits [T, V] of a text that is read in segments; after each, the memory is its last `memory_length` inputs."""
    d_model = weights["embedding"].shape[1]
    memory = [np.zeros((0, d_model))] * o.n_layers
    logits = []
    for start in range(0, len(ids), segment_length):
        x = weights["embedding"][ids[start : start + segment_length]]
        x = x * math.sqrt(d_model) if o.scale_embeddings else x
        hidden, inputs = segment(x, memory, weights, o)
        joined = [np.concatenate(both) for both in zip(memory, inputs, strict=True)]
        memory = [one[max(0, len(one) - memory_length) :] for one in joined]
        logits.append(hidden @ weights["output"].T + weights.get("output_bias", np.float64(0)))
    return np.concatenate(logits)
