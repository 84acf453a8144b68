"""The Star-Transformer (Guo et al. 2019): a text classifier, and an encoder-decoder with the same encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.config.architectures import StarClassifierSettings, StarSettings
from transduce.models.parts import DECODER_OPTIONS, EncoderDecoder, Parts, initialize
from transduce.nn.embedding import SegmentEmbedding, TokenEmbedding
from transduce.nn.masks import is_real, pad_memory
from transduce.nn.positions import POSITIONS
from transduce.nn.star import StarBlock, StarEncoder, pool_star
from transduce.nn.state import DecoderState

_ADDED = {name: POSITIONS[name] for name in ("learned", "sinusoidal", "none")}
CLASSIFIER_OPTIONS: Mapping[str, Mapping[str, Any]] = {"positions": _ADDED}
STAR_OPTIONS: Mapping[str, Mapping[str, Any]] = {**DECODER_OPTIONS, "positions": _ADDED}


class StarTransformer(EncoderDecoder[DecoderState]):
    """An encoder-decoder with the Star-Transformer as encoder and a Transformer's decoder.

    The memory is the relay node, followed by the satellite nodes. Id 0 is padding, allowed at both ends of the source
    and at the end of the target.
    """

    def __init__(self, settings: StarSettings, *, n_src: int, n_tgt: int) -> None:
        super().__init__()
        parts = Parts(settings)
        self.src_embedding = parts.embedding(n_src, causal=False)
        self.tgt_embedding = parts.embedding(n_tgt, causal=True)
        self.encoder = StarEncoder(
            StarBlock(
                settings.d_model,
                n_heads=settings.n_heads,
                dropout=settings.dropout,
                attention_dropout=settings.attention_dropout,
                bias=settings.bias,
            )
            for _ in range(settings.n_encoder_layers)
        )
        self.decoder = parts.decoder(cross=True)
        initialize(self)
        self.tie(settings, n_tgt)

    def start(self, src: Int[Tensor, "B S"], *, capacity: int = 0, n_beams: int = 1) -> DecoderState:
        x, real = self.src_embedding(src), is_real(src)
        if capacity:
            x, real = pad_memory(x, real, more=1)
        nodes, relay = self.encoder(x, real=real)
        mask = F.pad(real, (1, 0), value=True)[:, None]
        return self.decoder.start(torch.cat([relay, nodes], dim=1), mask, capacity=capacity, n_beams=n_beams)

    def advance(self, ids: Int[Tensor, "N T"], state: DecoderState) -> Float[Tensor, "N T D"]:
        x = self.tgt_embedding(ids, offset=state.length)
        return self.decoder(x, state, positions=self.tgt_embedding.positions)


class StarClassifier(nn.Module):
    """Classifier of texts or pairs of texts: a Star-Transformer, pooled, and two linear layers. Id 0 is padding."""

    def __init__(self, settings: StarClassifierSettings, *, n_src: int, n_tgt: int) -> None:
        """`n_tgt`: size of the vocabulary; `n_src` is not used."""
        super().__init__()
        s = settings
        assert s.n_labels is not None, "n_labels is not set"
        positions = POSITIONS[s.positions](d_model=s.d_model, d_head=s.d_model, max_positions=s.max_positions)
        self.embedding = TokenEmbedding(n_tgt, s.d_model, positions=positions, dropout=s.dropout)
        self.segment_embedding = SegmentEmbedding(s.n_segments, s.d_model) if s.n_segments else None
        self.encoder = StarEncoder(
            StarBlock(s.d_model, n_heads=s.n_heads, dropout=s.dropout) for _ in range(s.n_encoder_layers)
        )
        self.dense = nn.Linear(s.d_model, s.d_model)
        self.dropout = nn.Dropout(s.dropout)
        self.labels = nn.Linear(s.d_model, s.n_labels)
        initialize(self)

    def encode(
        self, ids: Int[Tensor, "B S"], segments: Int[Tensor, "B S"] | None = None
    ) -> tuple[Float[Tensor, "B S D"], Float[Tensor, "B 1 D"]]:
        """Return a vector per token, and the relay node's vector. `segments`: each token's segment (default: 0)."""
        table = self.segment_embedding
        more = None if table is None else table(segments)
        return self.encoder(self.embedding(ids, more=more), real=is_real(ids))

    def pooled(self, ids: Int[Tensor, "B S"], segments: Int[Tensor, "B S"] | None = None) -> Float[Tensor, "B D"]:
        """Return a vector per sequence, from which the layer `labels` computes logits."""
        return self.dropout(self.dense(pool_star(*self.encode(ids, segments), is_real(ids))).relu())

    def forward(self, ids: Int[Tensor, "B S"], segments: Int[Tensor, "B S"] | None = None) -> Float[Tensor, "B L"]:
        """Return the logits (unnormalized log-probabilities) of the L labels."""
        return self.labels(self.pooled(ids, segments))
