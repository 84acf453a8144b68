"""The attention weights of a model for a given sentence and translation.

Normal forward passes do not keep the weights (fused kernels never form them): see `recording`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from transduce.data.batch import collate
from transduce.data.examples import Example
from transduce.decoding.translator import Translator
from transduce.inspection.heatmap import HeatMap, SentenceAttention
from transduce.models.registry import architecture_of
from transduce.nn.masks import SourceInput
from transduce.nn.recording import record


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMaps:
    """Weights of all layers and heads over one sentence pair, float32, rows sum to 1.

    encoder [L, H, S, S], decoder [M, H, T, T] (causal), cross [M, H, T, S]; None for a part that the model lacks.
    relay: of a star, [L, H, 1, S + 1]; its memory, and so `cross`, has the relay node before the tokens.
    """

    encoder: np.ndarray | None
    relay: np.ndarray | None
    decoder: np.ndarray | None
    cross: np.ndarray | None

    def heat_maps(
        self, src_pieces: Sequence[str], tgt_in_pieces: Sequence[str], tgt_out_pieces: Sequence[str]
    ) -> list[HeatMap]:
        """Return heat maps, cross-attention first. A decoder's row t reads tgt_in[t] and predicts tgt_out[t]."""
        src, tgt_in, tgt_out = tuple(src_pieces), tuple(tgt_in_pieces), tuple(tgt_out_pieces)
        memory = src if self.relay is None else ("relay", *src)
        parts = [
            ("cross-attention: predicted piece to source", tgt_out, memory, self.cross),
            ("relay node to source", ("relay",), memory, self.relay),
            ("encoder self-attention", src, src, self.encoder),
            ("decoder self-attention: predicted piece to previous pieces", tgt_out, tgt_in, self.decoder),
        ]
        return [HeatMap(name, rows, columns, w) for name, rows, columns, w in parts if w is not None]


@torch.no_grad()
def attention_maps(model: nn.Module, src: SourceInput, tgt_in: Int[Tensor, "1 T"]) -> AttentionMaps:
    """Run the model on one sentence pair and return the weights of every layer and head.

    Ids of `src` end with EOS, and `tgt_in` begins with BOS, as in a `Batch` of one. Dropout is off meanwhile; the
    model's mode and parameters do not change.
    """
    assert src.shape[0] == 1 and tgt_in.shape[0] == 1, "one sentence at a time"
    training = model.training
    model.eval()
    try:
        with record(model, "*.weights") as found:
            model(src, tgt_in)
    finally:
        model.train(training)
    patterns = architecture_of(model).attention
    parts: dict[str, list[np.ndarray]] = {"encoder": [], "relay": [], "decoder": [], "cross": []}
    for name in found:
        part = next(part for part, pattern in patterns.items() if fnmatch(name, f"{pattern}.weights"))
        parts[part].append(found.value(name)[0].float().cpu().numpy())
    return AttentionMaps(**{part: np.stack(layers) if layers else None for part, layers in parts.items()})


def attention_of(translator: Translator, src: str, *, tgt: str | None = None) -> SentenceAttention:
    """Compute the attention weights for `tgt` (default: the model's translation of `src`). Raises `DataError`."""
    tokenizers = translator.tokenizers
    src_ids = tokenizers.src.encode(src)
    if tgt is None:
        translation = translator.translate([src])[0]
        tgt, tgt_ids = translation.text, list(translation.ids)
    else:
        tgt_ids = tokenizers.tgt.encode(tgt)
    translator.require_length(src_ids, tgt_ids)
    batch = collate([Example(src_ids, tgt_ids)]).to(translator.device)
    maps = attention_maps(translator.model, batch.src, batch.tgt_in)
    src_pieces = tokenizers.src.pieces(batch.src[0].tolist())
    tgt_pieces = (tokenizers.tgt.pieces(side[0].tolist()) for side in (batch.tgt_in, batch.tgt_out))
    return SentenceAttention(src, tgt, tuple(maps.heat_maps(src_pieces, *tgt_pieces)))
