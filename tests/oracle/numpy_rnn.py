"""Recurrent encoder-decoders in NumPy, sentence by sentence, from the equations of the papers alone.

LSTM: Hochreiter and Schmidhuber 1997 with forget gates. GRU: Cho et al. 2014, with the reset gate on the product, as in
cuDNN. Attention: Bahdanau et al. 2015, appendix A; Luong et al. 2015, section 3. Weights have the names of the model's
parameters. The gates of a matrix are in the order i, f, g, o or r, z, n, as in PyTorch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = Mapping[str, Array]


@dataclass(frozen=True)
class Options:
    cell: str
    attention: str
    input_feeding: bool
    direction: str
    bridge: str
    n_encoder_layers: int
    n_decoder_layers: int
    readout_scale: float


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def unit(weights: Weights, at: str, x: Array, state: tuple[Array, ...], more: Array | None, cell: str) -> Any:
    """One step of the unit at `at`; `more` is a second input."""
    x = x if more is None else np.concatenate([x, more])
    gates = weights[f"{at}.weight_ih"] @ x + weights[f"{at}.bias_ih"]
    product = weights[f"{at}.weight_hh"] @ state[0] + weights[f"{at}.bias_hh"]
    if cell == "lstm":
        i, f, g, o = np.split(gates + product, 4)
        c = sigmoid(f) * state[1] + sigmoid(i) * np.tanh(g)
        return sigmoid(o) * np.tanh(c), c
    (xr, xz, xn), (hr, hz, hn) = np.split(gates, 3), np.split(product, 3)
    r, z = sigmoid(xr + hr), sigmoid(xz + hz)
    return ((1 - z) * np.tanh(xn + r * hn) + z * state[0],)


def encode(weights: Weights, o: Options, x: Array) -> tuple[Array, list[tuple[Array, ...]]]:
    """The memory [S, H], and the last state of every layer."""
    finals = []
    reverses = {"both": [False, True], "forward": [False], "backward": [True]}[o.direction]
    for n in range(o.n_encoder_layers):
        outputs, last = [], []
        for d, reverse in enumerate(reverses):
            at = f"encoder.layers.{n}.{d}"
            width = weights[f"{at}.weight_hh"].shape[1]
            state: Any = (np.zeros(width),) * (2 if o.cell == "lstm" else 1)
            hidden = []
            for token in x[::-1] if reverse else x:
                state = unit(weights, at, token, state, None, o.cell)
                hidden.append(state[0])
            outputs.append(np.array(hidden[::-1] if reverse else hidden))
            last.append(state)
        x = np.concatenate(outputs, 1)
        finals.append(tuple(np.concatenate(parts) for parts in zip(*last, strict=True)))
    return x, finals


def attend(weights: Weights, o: Options, query: Array, memory: Array) -> tuple[Array, Array]:
    """The context, and the weights [S]."""
    at = "decoder.attention"
    scores = []
    for m in memory:
        if o.attention == "dot":
            scores.append(query @ m)
        elif o.attention == "general":
            scores.append(query @ (weights[f"{at}.key.weight"] @ m))
        else:
            inner = weights[f"{at}.query.weight"] @ query + weights[f"{at}.key.weight"] @ m + weights[f"{at}.key.bias"]
            scores.append(weights[f"{at}.score.weight"][0] @ np.tanh(inner))
    e = np.exp(np.array(scores) - max(scores))
    a = e / e.sum()
    return a @ memory, a


def first_states(weights: Weights, o: Options, finals: Sequence[tuple[Array, ...]]) -> list[tuple[Array, ...]]:
    if o.bridge == "copy":
        return list(finals)
    made = [
        np.split(
            np.tanh(weights[f"bridge.parts.{k}.weight"] @ part + weights[f"bridge.parts.{k}.bias"]), o.n_decoder_layers
        )
        for k, part in enumerate(finals[-1])
    ]
    return list(zip(*made, strict=True))


def hidden_states(weights: Weights, o: Options, src: Sequence[int], tgt_in: Sequence[int]) -> tuple[Array, Array]:
    """The vectors before the output matrix [T, D], and the attention weights [T, S]."""
    embedding, scale = weights["tgt_embedding.table.weight"], weights["tgt_embedding.table.weight"].shape[1] ** 0.5
    memory, finals = encode(weights, o, weights["src_embedding.table.weight"][list(src)] * scale)
    states = first_states(weights, o, finals)
    readout = weights["decoder.readout.weight"]
    feed = np.zeros(readout.shape[0])
    outputs, maps = [], []
    for token in tgt_in:
        x, before, more = embedding[token] * scale, states[-1][0], None
        if o.attention == "bahdanau":
            more, a = attend(weights, o, before, memory)
            maps.append(a)
            t = readout @ np.concatenate([before, more, x]) + weights["decoder.readout.bias"]
            half = len(t) // 2
            outputs.append(np.array([max(t[j], t[half + j]) for j in range(half)]))
        elif o.attention != "none" and o.input_feeding:
            more = feed
        inner = x
        for n in range(o.n_decoder_layers):
            states[n] = unit(weights, f"decoder.layers.{n}", inner, states[n], None if n else more, o.cell)
            inner = states[n][0]
        if o.attention == "none":
            outputs.append(o.readout_scale * np.tanh(readout @ inner))
        elif o.attention != "bahdanau":
            context, a = attend(weights, o, inner, memory)
            maps.append(a)
            feed = np.tanh(readout @ np.concatenate([context, inner]))
            outputs.append(o.readout_scale * feed)  # tanh bounds it: docs/family.md
    return np.array(outputs), np.array(maps)
