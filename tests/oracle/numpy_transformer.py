"""The Transformer of the paper in NumPy, float64, written from the equations alone.

Slow and simple on purpose: one sentence and one head at a time, a table of which query may see which key, no
dropout. It imports nothing of the project; `adapter.py` maps a model's weights to the names used here.

Weights are a flat mapping. `encoder.0.self.query.weight` is `[out, in]` as in `y = W x + b`; a missing bias is zero.

    src_embedding tgt_embedding output          [V, D]   (the same array where they are tied)
    src_positions tgt_positions                 [P, D]   learned positions only
    {encoder,decoder}.N.{self,cross}.{query,key,value,output}.{weight,bias}
    decoder.N.self.{gate,value}.{weight,bias}   an SSRU in place of self-attention only
    {encoder,decoder}.N.feed_forward.{inner,gate,outer}.{weight,bias}     a convolution's weight: [out, in, kernel]
    {encoder,decoder}.N.{self_norm,cross_norm,feed_forward_norm}.{weight,bias}
    {encoder,decoder}.norm.{weight,bias}        pre-norm only
    {src,tgt}_norm.{weight,bias}                where embeddings are normalised
    {encoder,decoder}.distances                 [32, H]   T5's relative positions only
    {encoder,decoder}.relations.{key,value}     [R, K]    Shaw's relative positions only
    output_bias                                 [V], where there is one

Numbers in brackets are sections of Vaswani et al. 2017, *Attention Is All You Need*.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Allowed = NDArray[np.bool_]
Weights = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Options:
    """Settings that the oracle needs in addition to the weights."""

    n_heads: int
    n_kv_heads: int
    n_encoder_layers: int
    n_decoder_layers: int
    residual: str = "post"
    norm: str = "layer"
    norm_epsilon: float = 1e-5
    positions: str = "sinusoidal"
    feed_forward: str = "plain"
    activation: str = "relu"
    projection: str = "full"
    scale_embeddings: bool = True
    embedding_norm: bool = False
    patterns: Mapping[str, str] = field(default_factory=dict)
    window: int = 0
    summary_tokens: int = 0
    factors: str = "heads"
    decoder_self: str = "attention"


# --- the functions of the equations ----------------------------------------------------------------------------------


def softmax(scores: Array) -> Array:
    """exp(x_i) / sum_j exp(x_j) over the last axis."""
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def log_softmax(scores: Array) -> Array:
    """log(exp(x_i) / sum_j exp(x_j)) over the last axis."""
    shifted = scores - scores.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def relu(x: Array) -> Array:
    """max(0, x) (3.3)."""
    return np.where(x > 0, x, 0.0)


def gelu(x: Array) -> Array:
    """x Phi(x), Phi the distribution function of the standard normal (Hendrycks and Gimpel 2016), exactly."""
    return x * 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


def gelu_tanh(x: Array) -> Array:
    """GELU's approximation by a tanh (Hendrycks and Gimpel 2016)."""
    return x * 0.5 * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Array) -> Array:
    """x / (1 + exp(-x)) (Elfwing et al. 2017), written so that no power overflows."""
    return x * 0.5 * (1.0 + np.tanh(x / 2.0))


ACTIVATIONS = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}


def layer_norm(x: Array, weight: Array, bias: Array | float, epsilon: float) -> Array:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias (Ba et al. 2016); the variance is the biased one."""
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * weight + bias


def rms_norm(x: Array, weight: Array, bias: Array | float, epsilon: float) -> Array:
    """x / sqrt(mean of squares + epsilon) * weight (Zhang and Sennrich 2019)."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight + bias


NORMS = {"layer": layer_norm, "rms": rms_norm}


def attention(
    query: Array, key: Array, value: Array, allowed: Allowed, bias: Array | None = None
) -> tuple[Array, Array]:
    """softmax(Q K^T / sqrt(d_k) + bias) V of one head (3.2.1), and the weights; `allowed[t, s]`: query t may see key s.

    A query that may see no key, which the paper does not define, gets equal weights for all keys.
    """
    bias = np.zeros((len(query), len(key))) if bias is None else bias
    n_queries, d_k = query.shape
    weights = np.zeros((n_queries, len(key)))
    for t in range(n_queries):
        seen = np.flatnonzero(allowed[t])
        if len(seen):
            weights[t, seen] = softmax(key[seen] @ query[t] / math.sqrt(d_k) + bias[t, seen])
        else:
            weights[t] = 1 / len(key)
    return weights @ value, weights


def sinusoid(n_positions: int, d_model: int) -> Array:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos(the same) (3.5)."""
    table = np.zeros((n_positions, d_model))
    for position in range(n_positions):
        for column in range(d_model):
            angle = position / 10000 ** ((column - column % 2) / d_model)
            table[position, column] = math.cos(angle) if column % 2 else math.sin(angle)
    return table


def rotate(x: Array) -> Array:
    """Rotary positions (Su et al. 2021, equation 15) on `x [T, K]`: pair i of position m turns by m / 10000^(2i / K).

    A pair is (x_2i, x_2i+1), a complex number.
    """
    n_positions, width = x.shape
    frequencies = 10000.0 ** (-np.arange(0, width, 2) / width)
    turns = np.exp(1j * np.arange(n_positions)[:, None] * frequencies[None, :])
    turned = (x[:, 0::2] + 1j * x[:, 1::2]) * turns
    result = np.empty_like(x)
    result[:, 0::2], result[:, 1::2] = turned.real, turned.imag
    return result


def alibi(n: int, head: int, n_heads: int) -> Array:
    """-slope * |distance| [n, n] (Press et al. 2022): of 8 heads, head h (from 0) has slope 2^-(h + 1).

    In general the slopes are a geometric sequence whose first element and ratio are 2^(-8 / n_heads). If n_heads is
    not a power of two: the sequence of the next lower power, then every other slope of the next higher power's.
    """
    power = 2 ** int(math.log2(n_heads))
    slope = 2.0 ** (-8 * (head + 1) / power) if head < power else 2.0 ** (-8 * (2 * (head - power) + 1) / (2 * power))
    return np.array([[-slope * abs(t - s) for s in range(n)] for t in range(n)])


def t5_bucket(distance: int, *, causal: bool) -> int:
    """The bucket of a key that comes `distance` positions before its query (Raffel et al. 2020, 2.1): 32 in all.

    Half of a direction's buckets are single distances; the others are logarithmic up to 128, where the last one starts.
    """
    n, first = (32, 0) if causal else (16, 16 if distance < 0 else 0)
    distance = abs(distance)
    if distance < n // 2:
        return first + distance
    far = n // 2 + math.floor(n // 2 * math.log(distance / (n // 2)) / math.log(128 / (n // 2)) + 1e-9)
    return first + min(far, n - 1)


def score_bias(n: int, head: int, weights: Weights, stack: str, options: Options) -> Array:
    """The bias that positions add to the scores [n, n] of a head's self-attention."""
    if options.positions == "alibi":
        return alibi(n, head, options.n_heads)
    if options.positions == "t5":
        table, causal = weights[f"{stack}.distances"], stack == "decoder"
        column = [[t5_bucket(max(t - s, 0) if causal else t - s, causal=causal) for s in range(n)] for t in range(n)]
        return table[np.array(column), head]
    return np.zeros((n, n))


def relation(t: int, s: int, n_vectors: int, *, causal: bool) -> int:
    """The index of a_ts, w_clip(t - s, k) (Shaw et al. 2018, 3.2), by t - s: from -k on, in a decoder from 0 on."""
    k = n_vectors - 1 if causal else n_vectors // 2
    return max(0 if causal else -k, min(k, t - s)) + (0 if causal else k)


def relative_attention(
    query: Array, key: Array, value: Array, allowed: Allowed, vectors: tuple[Array, Array], *, causal: bool
) -> tuple[Array, Array]:
    """z_i = sum_j alpha_ij (v_j + a_ij^V), e_ij = q_i (k_j + a_ij^K) / sqrt(d_z) (Shaw et al. 2018, equations 3, 4)."""
    n, d_z = query.shape
    output, weights = np.zeros_like(query), np.zeros((n, n))
    for i in range(n):
        seen = np.flatnonzero(allowed[i])
        if len(seen) == 0:
            continue
        index = [relation(i, j, len(vectors[0]), causal=causal) for j in seen]
        alpha = softmax((key[seen] + vectors[0][index]) @ query[i] / math.sqrt(d_z))
        output[i], weights[i, seen] = alpha @ (value[seen] + vectors[1][index]), alpha
    return output, weights


# --- the parts of the model -------------------------------------------------------------------------------------------


def linear(x: Array, weights: Weights, name: str) -> Array:
    """W x + b."""
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", np.float64(0))


def heads_of(x: Array, weights: Weights, name: str, n_heads: int, projection: str) -> list[Array]:
    """The projections of `x [T, D]`, one `[T, K]` per head (3.2.2).

    full: head h has its own rows of the weight, and sees all of x.
    shared: every head sees its own slice of x, all through the same [K, K] weight (W^O stays whole).
    """
    if projection == "shared":
        return [linear(part, weights, name) for part in np.split(x, n_heads, axis=-1)]
    return np.split(linear(x, weights, name), n_heads, axis=-1)


def multi_head(
    x: Array, memory: Array, weights: Weights, name: str, allowed: Allowed, options: Options
) -> tuple[Array, Array]:
    """Concat(head_1, ..., head_h) W^O (3.2.2) for `x [T, D]`, and the weights of all heads `[H, T, S]`.

    With fewer heads of keys and values than of queries, neighbouring query heads share one (Ainslie et al. 2023).
    Self-attention has positions: rotated queries and keys, a bias on the scores, or vectors of relations.
    """
    n_heads, n_kv_heads = options.n_heads, options.n_kv_heads
    queries = heads_of(x, weights, f"{name}.query", n_heads, options.projection)
    keys = heads_of(memory, weights, f"{name}.key", n_kv_heads, options.projection)
    values = heads_of(memory, weights, f"{name}.value", n_kv_heads, options.projection)
    allowed = np.broadcast_to(allowed, (n_heads, len(x), len(memory)))
    outputs, maps = [], []
    to_itself = name.endswith(".self")
    for head in range(n_heads):
        group = head // (n_heads // n_kv_heads)
        query, key = queries[head], keys[group]
        if to_itself and options.positions == "rotary":
            query, key = rotate(query), rotate(key)
        stack = name.split(".")[0]
        if to_itself and options.positions == "shaw":
            vectors = weights[f"{stack}.relations.key"], weights[f"{stack}.relations.value"]
            output, weights_of_head = relative_attention(
                query, key, values[group], allowed[head], vectors, causal=stack == "decoder"
            )
        else:
            bias = score_bias(len(x), head, weights, stack, options) if to_itself else None
            output, weights_of_head = attention(query, key, values[group], allowed[head], bias)
            if options.patterns.get(stack) == "fixed":  # before the first summary: a sum over no key
                output = np.where(allowed[head].any(1, keepdims=True), output, 0.0)
        outputs.append(output)
        maps.append(weights_of_head)
    return linear(np.concatenate(outputs, axis=-1), weights, f"{name}.output"), np.stack(maps)


def ssru(x: Array, weights: Weights, name: str) -> Array:
    """ReLU(c_t), c_t = f_t c_(t-1) + (1 - f_t) W x_t, f_t = sigmoid(W_f x_t + b_f), c_0 = 0 (Kim et al. 2019, 3)."""
    state, result = np.zeros(x.shape[1]), np.zeros_like(x)
    for t in range(len(x)):
        forget = 0.5 * (1.0 + np.tanh(linear(x[t], weights, f"{name}.gate") / 2.0))
        state = forget * state + (1.0 - forget) * linear(x[t], weights, f"{name}.value")
        result[t] = relu(state)
    return result


def convolve(x: Array, weights: Weights, name: str, *, causal: bool) -> Array:
    """y_t = sum_j W_j x_(t + j - left) + b with zeros beyond the ends; `causal`: no j may point after t."""
    weight = weights[f"{name}.weight"]
    kernel = weight.shape[-1]
    left = kernel - 1 if causal else (kernel - 1) // 2
    result = np.zeros((len(x), weight.shape[0])) + weights.get(f"{name}.bias", np.float64(0))
    for t in range(len(x)):
        for j in range(kernel):
            if 0 <= t + j - left < len(x):
                result[t] += weight[:, :, j] @ x[t + j - left]
    return result


def feed_forward(x: Array, weights: Weights, name: str, options: Options, *, causal: bool) -> Array:
    """plain: W2 f(W1 x + b1) + b2 (3.3); gated: W2 (f(Wg x) * (W1 x)) (Shazeer 2020); conv: both convolve (3.3)."""
    f = ACTIVATIONS[options.activation]
    if options.feed_forward == "conv":
        inner = f(convolve(x, weights, f"{name}.inner", causal=causal))
        return convolve(inner, weights, f"{name}.outer", causal=causal)
    inner = linear(x, weights, f"{name}.inner")
    inner = f(linear(x, weights, f"{name}.gate")) * inner if options.feed_forward == "gated" else f(inner)
    return linear(inner, weights, f"{name}.outer")


def normalise(x: Array, weights: Weights, name: str, options: Options) -> Array:
    """The norm of these options with the weights under `name`."""
    return NORMS[options.norm](
        x, weights[f"{name}.weight"], weights.get(f"{name}.bias", np.float64(0)), options.norm_epsilon
    )


def marian_sinusoid(position: int, width: int) -> list[float]:
    """The sines, then the cosines, of the position times 10000^(-i / (half - 1)), and a 0 if the width is odd."""
    half = width // 2
    angles = [position * 10000 ** (-i / (half - 1)) for i in range(half)]
    return [*map(math.sin, angles), *map(math.cos, angles), *[0.0] * (width % 2)]


def embed(ids: NDArray[np.int64], weights: Weights, side: str, options: Options, first: int = 0) -> Array:
    """Embedding times sqrt(d_model) (3.4), plus the position's vector where positions are added (3.5).

    `first` is the position of the first token; padding before it makes it larger than 0.
    """
    table = weights[f"{side}_embedding"]
    x = table[ids] * (math.sqrt(table.shape[1]) if options.scale_embeddings else 1.0)
    if options.positions == "sinusoidal":
        x = x + sinusoid(first + len(ids), table.shape[1])[first:]
    if options.positions == "sinusoidal_halves":
        known = sinusoid(first + len(ids), table.shape[1])[first:]
        x = x + np.concatenate([known[:, 0::2], known[:, 1::2]], axis=1)
    if options.positions in ("sinusoidal_fairseq", "sinusoidal_marian"):
        start = first + (2 if options.positions == "sinusoidal_fairseq" else 0)
        x = x + np.array([marian_sinusoid(start + t, table.shape[1]) for t in range(len(ids))])
    if options.positions == "learned":
        x = x + weights[f"{side}_positions"][first : first + len(ids)]
    return normalise(x, weights, f"{side}_norm", options) if options.embedding_norm else x


def sublayer(x: Array, weights: Weights, name: str, options: Options, function: Callable[[Array], Array]) -> Array:
    """post: LayerNorm(x + Sublayer(x)) (3.1); pre: x + Sublayer(LayerNorm(x))."""
    if options.residual == "pre":
        return x + function(normalise(x, weights, f"{name}_norm", options))
    return normalise(x + function(x), weights, f"{name}_norm", options)


def block(
    x: Array,
    weights: Weights,
    at: str,
    options: Options,
    allowed: Allowed,
    memory: Array | None = None,
    *,
    causal: bool = False,
) -> Array:
    """One block (3.1): self-attention, attention to `memory` if given (a decoder's block), feed-forward."""

    def attend(y: Array) -> Array:
        if causal and options.decoder_self == "ssru":
            return ssru(y, weights, f"{at}.self")
        return multi_head(y, y, weights, f"{at}.self", allowed, options)[0]

    def attend_to_memory(y: Array) -> Array:
        everything = np.ones((len(y), len(memory)), dtype=bool)
        return multi_head(y, memory, weights, f"{at}.cross", everything, options)[0]

    def transform(y: Array) -> Array:
        return feed_forward(y, weights, f"{at}.feed_forward", options, causal=causal)

    x = sublayer(x, weights, f"{at}.self", options, attend)
    if memory is not None:
        x = sublayer(x, weights, f"{at}.cross", options, attend_to_memory)
    return sublayer(x, weights, f"{at}.feed_forward", options, transform)


def encode(src: NDArray[np.int64], weights: Weights, options: Options, first: int = 0) -> Array:
    """The encoder (3.1) on one sentence without padding: `src [S]` to `memory [S, D]`."""
    x = embed(src, weights, "src", options, first)
    for n in range(options.n_encoder_layers):
        x = block(x, weights, f"encoder.{n}", options, seen_by(len(src), options, "encoder", n, first=first))
    return normalise(x, weights, "encoder.norm", options) if options.residual == "pre" else x


def factors_of(i: int, j: int, pattern: str, options: Options) -> tuple[bool, ...]:
    """Whether position i may attend to j by each factor of a pattern (Child et al. 2019, 4.2), whatever their order."""
    length, summary = options.window, options.summary_tokens
    near = abs(i - j) < length
    if pattern == "strided":
        return near, (i - j) % length == 0
    if pattern == "fixed":
        return i // length == j // length, j % length in range(max(0, length - summary), length)
    return (near if pattern == "local" else True,)


def seen_by(n: int, options: Options, stack: str, layer: int, *, first: int = 0) -> Allowed:
    """[H, n, n]: position t of an encoder sees all positions, of a decoder itself and those before it, as far as the
    stack's pattern allows. Heads have the factors in equal groups, the larger ones first, or layers have them in turn.
    """
    pattern = options.patterns.get(stack, "full")
    n_factors = len(factors_of(0, 0, pattern, options))
    groups = np.repeat(np.arange(n_factors), [len(x) for x in np.array_split(range(options.n_heads), n_factors)])

    def seen(t: int, s: int, head: int) -> bool:
        chosen = groups[head] if options.factors == "heads" else layer % n_factors
        return factors_of(t + first, s + first, pattern, options)[chosen] and (s <= t or stack == "encoder")

    heads = range(options.n_heads)
    found = [[[seen(t, s, head) for s in range(n)] for t in range(n)] for head in heads]
    return np.array(found, dtype=bool).reshape(len(heads), n, n)


def decode(tgt: NDArray[np.int64], memory: Array, weights: Weights, options: Options) -> Array:
    """The decoder (3.1) on one sentence without padding: `tgt [T]` and `memory [S, D]` to `hidden [T, D]`."""
    x = embed(tgt, weights, "tgt", options)
    for n in range(options.n_decoder_layers):
        x = block(x, weights, f"decoder.{n}", options, seen_by(len(tgt), options, "decoder", n), memory, causal=True)
    return normalise(x, weights, "decoder.norm", options) if options.residual == "pre" else x


def causal_lm(ids: NDArray[np.int64], weights: Weights, options: Options) -> Array:
    """Logits `[T, V]` of a decoder alone (Radford et al. 2018): every token sees itself and the tokens before it."""
    x = embed(ids, weights, "tgt", options)
    for n in range(options.n_decoder_layers):
        x = block(x, weights, f"decoder.{n}", options, seen_by(len(ids), options, "decoder", n), causal=True)
    x = normalise(x, weights, "decoder.norm", options) if options.residual == "pre" else x
    return x @ weights["output"].T + weights.get("output_bias", np.float64(0))


def transformer(
    src: NDArray[np.int64], tgt: NDArray[np.int64], weights: Weights, options: Options, first: int = 0
) -> Array:
    """Logits `[T, V]` of one pair without padding: `src [S]`, `tgt [T]` (the decoder's input)."""
    hidden = decode(tgt, encode(src, weights, options, first), weights, options)
    return hidden @ weights["output"].T + weights.get("output_bias", np.float64(0))


# --- the loss ---------------------------------------------------------------------------------------------------------


def smoothed(logits: Array, gold: NDArray[np.int64], smoothing: float) -> Array:
    """The target distributions: (1 - smoothing) on the gold token plus smoothing / V on every token, gold included."""
    n_tokens, vocab_size = logits.shape
    target = np.full((n_tokens, vocab_size), smoothing / vocab_size)
    target[np.arange(n_tokens), gold] += 1.0 - smoothing
    return target


def label_smoothed(logits: Array, gold: NDArray[np.int64], smoothing: float) -> tuple[float, float]:
    """Sums over positions: the cross-entropy with smoothed targets (5.4; Szegedy et al. 2015), and -log p(gold)."""
    log_p = log_softmax(logits)
    return float(-(smoothed(logits, gold, smoothing) * log_p).sum()), float(-log_p[np.arange(len(gold)), gold].sum())


def label_smoothed_gradient(logits: Array, gold: NDArray[np.int64], smoothing: float) -> Array:
    """The derivative of the first of `label_smoothed` with respect to the logits: softmax - target."""
    return softmax(logits) - smoothed(logits, gold, smoothing)
