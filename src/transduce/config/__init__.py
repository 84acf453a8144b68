"""Settings: frozen, validated, each default written once."""

from transduce.config.model import (
    BertClassifierSettings,
    BertEncoderSettings,
    BertSettings,
    DecoderSettings,
    EncoderSettings,
    GPTSettings,
    ModelSettings,
    OutputSettings,
    PoolingSettings,
    TransformerSettings,
    model_settings,
    resolve_preset,
)
from transduce.config.recipe import apply_override, read_recipe, to_toml
from transduce.config.section import resolved
from transduce.config.settings import (
    Corpus,
    DataSettings,
    DecodingSettings,
    EvaluationSettings,
    Settings,
    TokenizerSettings,
    TrainingSettings,
)

__all__ = [
    "BertClassifierSettings",
    "BertEncoderSettings",
    "BertSettings",
    "Corpus",
    "DataSettings",
    "DecoderSettings",
    "DecodingSettings",
    "EncoderSettings",
    "EvaluationSettings",
    "GPTSettings",
    "ModelSettings",
    "OutputSettings",
    "PoolingSettings",
    "Settings",
    "TokenizerSettings",
    "TrainingSettings",
    "TransformerSettings",
    "apply_override",
    "model_settings",
    "read_recipe",
    "resolve_preset",
    "resolved",
    "to_toml",
]
