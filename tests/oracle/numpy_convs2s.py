"""ConvS2S (Gehring et al. 2017) in NumPy, float64, written from the paper's equations alone.

Slow and simple on purpose: one sentence and one position at a time, no dropout. Numbers in brackets are sections of
*Convolutional Sequence to Sequence Learning*. Where the paper leaves a factor open, the authors' code decides: the sums
of section 3.3 (decoder state and embedding; memory and embedding) are multiplied by sqrt(0.5) like other sums.

Weights are a flat mapping; a matrix is [out, in] as in y = W x + b.

    src_embedding tgt_embedding output          [V, D]
    src_positions tgt_positions                 [P, D]
    {encoder,decoder}.{in,out}.{weight,bias}    between the embeddings' width and the convolutions'
    {encoder,decoder}.N.conv.{weight,bias}      [2 C, kernel, C], [2 C]
    decoder.N.{query,context}.{weight,bias}     W_d [D, C] of equation 1; [C, D] back to the convolutions' width
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ids = NDArray[np.int64]
Weights = Mapping[str, Array]
HALF = np.sqrt(0.5)


def affine(x: Array, weights: Weights, at: str) -> Array:
    """W x + b of every row."""
    return x @ weights[f"{at}.weight"].T + weights[f"{at}.bias"]


def glu(y: Array) -> Array:
    """v([A B]) = A * sigmoid(B) [3.2]."""
    a, b = np.split(y, 2)
    return a / (1 + np.exp(-b))


def convolution(x: Array, weights: Weights, at: str, *, causal: bool) -> Array:
    """The gated convolution of every window; positions outside the sentence are zeros [3.2, 3.3]."""
    kernel, bias = weights[f"{at}.weight"], weights[f"{at}.bias"]
    k = kernel.shape[1]
    first = k - 1 if causal else (k - 1) // 2
    rows = []
    for t in range(len(x)):
        y = bias.copy()
        for i in range(k):
            if 0 <= t - first + i < len(x):
                y += kernel[:, i] @ x[t - first + i]
        rows.append(glu(y))
    return np.array(rows)


def embed(ids: Ids, weights: Weights, side: str, first: int = 0) -> Array:
    """e = (w_1 + p_1, ..., w_m + p_m) [3.1]; `first`: the position of the first token."""
    return weights[f"{side}_embedding"][ids] + weights[f"{side}_positions"][first : first + len(ids)]


def n_layers(weights: Weights, stack: str) -> int:
    return sum(name.startswith(f"{stack}.") and name.endswith("conv.bias") for name in weights)


def encode(e: Array, weights: Weights) -> Array:
    """The memory z [3.2]."""
    h = affine(e, weights, "encoder.in")
    for n in range(n_layers(weights, "encoder")):
        h = (convolution(h, weights, f"encoder.{n}.conv", causal=False) + h) * HALF
    return affine(h, weights, "encoder.out")


def attend(h: Array, g: Array, z: Array, e: Array, weights: Weights, at: str) -> tuple[Array, Array]:
    """The context of one decoder state h with the embedding g [3.3, equations 1 and 2], and the weights."""
    d = (affine(h[None], weights, f"{at}.query")[0] + g) * HALF
    scores = np.array([d @ z_j for z_j in z])
    a = np.exp(scores - scores.max())
    a /= a.sum()
    m = len(z)
    c = sum(a_j * (z_j + e_j) * HALF for a_j, z_j, e_j in zip(a, z, e, strict=True))
    return affine((m * np.sqrt(1 / m) * c)[None], weights, f"{at}.context")[0], a


def decode(g: Array, z: Array, e: Array, weights: Weights) -> tuple[Array, Array]:
    """The last hidden states [T, D] and the attention weights [layers, T, S] [3.3]; z: memory, e: its embeddings."""
    h = affine(g, weights, "decoder.in")
    maps = []
    for n in range(n_layers(weights, "decoder")):
        y = convolution(h, weights, f"decoder.{n}.conv", causal=True)
        found = [attend(y_i, g_i, z, e, weights, f"decoder.{n}") for y_i, g_i in zip(y, g, strict=True)]
        context = np.array([c for c, _ in found])
        h = ((y + context) * HALF + h) * HALF
        maps.append(np.array([a for _, a in found]))
    return affine(h, weights, "decoder.out"), np.array(maps)


def logits(src: Ids, tgt_in: Ids, weights: Weights, first: int = 0) -> Array:
    """Logits [T, V]; `first`: the position of the first source token."""
    e = embed(src, weights, "src", first)
    hidden, _ = decode(embed(tgt_in, weights, "tgt"), encode(e, weights), e, weights)
    return hidden @ weights["output"].T + weights.get("output_bias", 0.0)


def from_layers(known: Mapping[str, Array]) -> dict[str, Array]:
    """The names above for the weights of `nn.convolutional.ConvEncoder` and `ConvDecoder`."""
    weights = {}
    for name, weight in known.items():
        stack, *rest = name.replace("widen", "in").replace("narrow", "out").split(".")
        if rest[0] == "blocks":
            kernel = weight.reshape(len(weight), -1, len(weight) // 2) if weight.ndim == 2 else weight
            weights[f"{stack}.{rest[1]}.conv.{rest[3]}"] = kernel
        elif rest[0] == "attentions":
            part, kind = {"key": ("query", "weight"), "query_bias": ("query", "bias"), "value": ("context", rest[-1])}[
                rest[2]
            ]
            value = weight.T if rest[2] == "key" else weight[0] if rest[2] == "query_bias" else weight
            weights[f"{stack}.{rest[1]}.{part}.{kind}"] = value
        else:
            weights[f"{stack}.{'.'.join(rest)}"] = weight
    return weights
