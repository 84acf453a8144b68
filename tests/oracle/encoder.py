"""Weights of an encoder-only model under the oracle's names. Segments become part of the positions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from oracle.adapter import _block, _copy
from oracle.numpy_transformer import Array
from transduce.config.model import ModelSettings


def encoder_weights(state: Mapping[str, Tensor], s: ModelSettings, segments: NDArray[np.int64]) -> dict[str, Array]:
    """The weights that `numpy_transformer.encode` needs for one sentence; `segments[t]`: the segment of token t."""
    known = {name.replace(".blocks.", "."): tensor.detach().double().numpy() for name, tensor in state.items()}
    weights: dict[str, Array] = {"src_embedding": known["embedding.table.weight"]}
    if s.positions == "learned":
        weights["src_positions"] = known["embedding.positions.embedding.weight"][: len(segments)]
        if s.n_segments:
            weights["src_positions"] = weights["src_positions"] + known["segment_embedding.weight"][segments]
    elif getattr(s, "n_segments", 0):
        raise NotImplementedError("segments without learned positions")
    _copy(known, "embedding.norm", weights, "src_norm")
    _copy(known, "encoder.norm", weights, "encoder.norm")
    for n in range(s.n_encoder_layers):
        _block(known, f"encoder.{n}", weights, s)
    return weights
