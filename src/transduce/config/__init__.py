"""Settings: frozen, validated, each default written once."""

# ruff: noqa: F401

from transduce.config.model import (
    AttentionSettings,
    BertClassifierSettings,
    BertEncoderSettings,
    BertSettings,
    BlockSettings,
    ConvS2SSettings,
    DecoderSettings,
    EncoderSettings,
    GPTSettings,
    ModelSettings,
    OutputSettings,
    PoolingSettings,
    RecurrentSettings,
    StarClassifierSettings,
    StarSettings,
    TransformerSettings,
    TransformerXLSettings,
    model_settings,
    resolve_preset,
)
from transduce.config.recipe import apply_overrides, read_recipe, to_toml
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
