"""Settings of encoders without a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from transduce.config.model.attention import AttentionSettings, SourceSettings
from transduce.config.model.base import Blocks, OutputSettings, Preset

_BERT: Preset = {
    "activation": "gelu",
    "attention_dropout": 0.1,
    "norm_eps": 1e-12,
    "embedding_norm": True,
    "scale_embeddings": False,
    "positions": "learned",
    "max_positions": 512,
    "n_segments": 2,
    "output_bias": True,
}


class EncoderSettings(AttentionSettings):
    """An encoder without a decoder (Devlin et al. 2019, BERT): what its variants share."""

    presets: ClassVar[Mapping[str, Preset]] = {
        f"bert-{name}": {**_BERT, "n_encoder_layers": n, "d_model": d, "d_ff": 4 * d, "n_heads": d // 64}
        for name, n, d in (("tiny", 2, 128), ("mini", 4, 256), ("small", 4, 512), ("base", 12, 768))
    }

    n_encoder_layers: Blocks = Field(4, description="Number of encoder blocks.")
    encoder_pattern: str = Field(
        "full", description="Who attends to whom in the encoder: full, local, strided or fixed (Child et al. 2019)."
    )
    n_segments: int = Field(0, ge=0, le=1024, description="Number of learned segment embeddings; 0: none.")


class BertSettings(EncoderSettings, OutputSettings):
    """A masked language model."""

    task = "masked"

    kind: Literal["bert"] = Field("bert", description="Architecture: an encoder that predicts masked tokens.")
    next_sentence: bool = Field(False, description="Also predict whether segment B follows A in the text (BERT).")


class PoolingSettings(EncoderSettings):
    """What encoders that give one vector per text share."""

    pooling: str = Field("first", description="Vector of a text: first token ([CLS], BERT), mean, max or conv (CNN).")


class BertEncoderSettings(PoolingSettings):
    """An encoder without a head, as imported."""

    task = "encoding"

    kind: Literal["bert-encoder"] = Field("bert-encoder", description="Architecture: an encoder without a head.")


class BertClassifierSettings(PoolingSettings, SourceSettings):
    """A classifier of texts; with `source` = "vectors" a Vision Transformer (Dosovitskiy et al. 2021)."""

    task = "classification"
    presets: ClassVar[Mapping[str, Preset]] = {
        **EncoderSettings.presets,
        "cnn": {"n_encoder_layers": 0, "positions": "none", "scale_embeddings": False, "pooling": "conv"},  # Kim 2014
    }

    kind: Literal["bert-classifier"] = Field("bert-classifier", description="Architecture: an encoder and a label.")
    n_labels: int | None = Field(None, ge=2, le=1 << 20, description="Number of labels (default: from the data).")
