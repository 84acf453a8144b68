"""Settings of the model: one class per architecture, with only the fields that it has, and named sizes (presets)."""

# ruff: noqa: F401

from transduce.config.model.attention import AttentionSettings, BlockSettings, DecoderSettings
from transduce.config.model.base import ModelSettings, OutputSettings
from transduce.config.model.bert import (
    BertClassifierSettings,
    BertEncoderSettings,
    BertSettings,
    EncoderSettings,
    PoolingSettings,
)
from transduce.config.model.convs2s import ConvS2SSettings
from transduce.config.model.gpt import GPTSettings
from transduce.config.model.kinds import (
    MODEL_SETTINGS,
    AnyModelSettings,
    default_kind,
    kinds_for,
    model_settings,
    preset_values,
    resolve_preset,
)
from transduce.config.model.rnn import RecurrentSettings
from transduce.config.model.star import StarClassifierSettings, StarSettings
from transduce.config.model.transformer import TransformerSettings
from transduce.config.model.transformer_xl import TransformerXLSettings
