"""Encoders without a decoder (BERT, Devlin et al. 2019): a masked language model, a text classifier, a plain encoder.

The models name their common weights alike, so that a classifier can be fine-tuned from a masked language model.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from transduce.config.architectures import BertClassifierSettings, BertSettings, EncoderSettings, PoolingSettings
from transduce.models.parts import ENCODER_OPTIONS, Parts, TokenPredictor, initialize
from transduce.nn.embedding import SegmentEmbedding
from transduce.nn.feedforward import ACTIVATIONS
from transduce.nn.masks import SourceInput, is_real, padding_mask
from transduce.nn.pooling import POOLINGS, Pooler

POOLING_OPTIONS = {**ENCODER_OPTIONS, "pooling": POOLINGS}


class TextEncoder(nn.Module):
    """Base of encoder models: embeddings of tokens, positions and segments, and the encoder's stack.

    Padding is id 0, or a vector of NaN.
    """

    def __init__(self, settings: EncoderSettings, *, n_src: int, n_tgt: int) -> None:
        """`n_tgt`: size of the vocabulary; `n_src` is not used."""
        super().__init__()
        s, parts = settings, Parts(settings)
        self.embedding: Any = parts.source_embedding(n_tgt)  # a token embedding, except in a `Classifier` of vectors
        self.segment_embedding = SegmentEmbedding(s.n_segments, s.d_model) if s.n_segments else None
        self.encoder = parts.encoder()

    def encode(self, ids: SourceInput, segments: Int[Tensor, "B S"] | None = None) -> Float[Tensor, "B S D"]:
        """Return the hidden states of the last layer. `segments`: each token's segment number (default: 0)."""
        table = self.segment_embedding
        more = None if table is None else table(segments)
        x = self.embedding(ids, more=more)
        return self.encoder(x, mask=padding_mask(ids), positions=self.embedding.positions)


class PooledEncoder(TextEncoder):
    """A text encoder that returns a vector for each token and a pooled vector for each sequence."""

    def __init__(self, settings: PoolingSettings, *, n_src: int, n_tgt: int) -> None:
        super().__init__(settings, n_src=n_src, n_tgt=n_tgt)
        self.pooler = POOLINGS[settings.pooling](settings.d_model, bias=settings.bias)
        initialize(self)

    def forward(
        self, ids: Int[Tensor, "B S"], segments: Int[Tensor, "B S"] | None = None
    ) -> tuple[Float[Tensor, "B S D"], Float[Tensor, "B D"]]:
        """Return the hidden states and the pooled vector of each sequence."""
        hidden = self.encode(ids, segments)
        return hidden, self.pooler(hidden, is_real(ids))


class MaskedHead(nn.Module):
    """BERT's transformation of hidden states before the output matrix: linear layer, activation, norm."""

    def __init__(self, settings: BertSettings) -> None:
        super().__init__()
        self.dense = nn.Linear(settings.d_model, settings.d_model, bias=settings.bias)
        self.activate = ACTIVATIONS[settings.activation]
        self.norm = Parts(settings).norm()

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        return self.norm(self.activate(self.dense(x)))


class MaskedLM(TextEncoder, TokenPredictor):
    """BERT's masked language model. With `settings.next_sentence`, it also predicts whether segment B follows A."""

    def __init__(self, settings: BertSettings, *, n_src: int, n_tgt: int) -> None:
        """`settings.tie` = "none": a separate output matrix."""
        super().__init__(settings, n_src=n_src, n_tgt=n_tgt)
        self.head = MaskedHead(settings)
        self.pooler = Pooler(settings.d_model, bias=settings.bias) if settings.next_sentence else None
        self.next_sentence = nn.Linear(settings.d_model, 2) if settings.next_sentence else None
        initialize(self)
        self.add_output(settings, n_tgt, tied=self.embedding.table)

    def forward(
        self, ids: Int[Tensor, "B S"], segments: Int[Tensor, "B S"] | None, places: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, "B 2"] | None]:
        """Return the vectors that enter the output matrix for the tokens at `places`, and the next-sentence logits.

        `places`: row * S + column of each token to predict; only these tokens pass through the head. The logits belong
        to "B follows A" and "B does not follow A"; None without `settings.next_sentence`.
        """
        hidden = self.encode(ids, segments)
        asked = self.head(hidden.flatten(0, 1).index_select(0, places))
        if self.pooler is None or self.next_sentence is None:
            return asked, None
        return asked, self.next_sentence(self.pooler(hidden, is_real(ids)))


class Classifier(TextEncoder):
    """Classifier of texts, pairs of texts or sequences of vectors, with `settings.n_labels` labels.

    Encoder, pooler, dropout and a linear layer (Devlin et al. 2019, 4.1).
    """

    def __init__(self, settings: BertClassifierSettings, *, n_src: int, n_tgt: int) -> None:
        super().__init__(settings, n_src=n_src, n_tgt=n_tgt)
        assert settings.n_labels is not None, "n_labels is not set"
        self.pooler = POOLINGS[settings.pooling](settings.d_model, bias=settings.bias)
        self.dropout = nn.Dropout(settings.dropout)
        self.labels = nn.Linear(settings.d_model, settings.n_labels)
        initialize(self)

    def pooled(self, ids: SourceInput, segments: Int[Tensor, "B S"] | None = None) -> Float[Tensor, "B D"]:
        """Return the pooled vector of each sequence, from which the layer `labels` computes logits."""
        return self.dropout(self.pooler(self.encode(ids, segments), is_real(ids)))

    def forward(self, ids: SourceInput, segments: Int[Tensor, "B S"] | None = None) -> Float[Tensor, "B L"]:
        """Return the logits (unnormalized log-probabilities) of the L labels."""
        return self.labels(self.pooled(ids, segments))
