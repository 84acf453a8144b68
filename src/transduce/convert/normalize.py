"""Rewriting a model of ours as an equal one that GPT-2 and BERT can express."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from transduce.config import BertSettings, EncoderSettings, ModelSettings, OutputSettings
from transduce.convert.weight_map import Entry
from transduce.nn.positions import POSITIONS

SettingsT = TypeVar("SettingsT", bound=ModelSettings)


def normalize(s: SettingsT, tensors: Mapping[str, Tensor]) -> tuple[SettingsT, dict[str, Tensor]]:
    """Settings and tensors of an equal model with learned positions, unscaled embeddings, segments and biases.

    The models are equal up to `max_positions`. Scaled embeddings are no longer tied to the output matrix. Tensors that
    need no change keep their bits.
    """
    found, changes = dict(tensors), dict[str, Any]()
    if s.positions != "learned":
        found["embedding.positions.embedding.weight"] = position_table(s)
        changes["positions"] = "learned"
    if s.scale_embeddings:
        table = found["embedding.table.weight"]
        found["embedding.table.weight"] = table * math.sqrt(s.d_model)
        changes |= {"scale_embeddings": False} | ({"tie": "none"} if isinstance(s, OutputSettings) else {})
    if isinstance(s, EncoderSettings) and not s.n_segments:
        found["segment_embedding.weight"] = torch.zeros(2, s.d_model)
        changes["n_segments"] = 2
    if isinstance(s, BertSettings) and not s.output_bias:
        found["output_bias"] = torch.zeros(len(found["embedding.table.weight"]))
        changes["output_bias"] = True
    return s.model_copy(update=changes), found


def position_table(s: ModelSettings) -> Tensor:
    """The vectors [max_positions, D] that computed positions add to embeddings."""
    positions = POSITIONS[s.positions](d_model=s.d_model, d_head=s.d_head, max_positions=s.max_positions)
    return positions.add(torch.zeros(1, s.max_positions, s.d_model), 0)[0]


def with_biases(tensors: Mapping[str, Tensor], entries: Sequence[Entry]) -> dict[str, Tensor]:
    """The tensors of a weight map, with zeros for biases that the model does not have."""

    def tensor(name: str) -> Tensor:
        if name not in tensors and name.endswith(".bias"):
            return torch.zeros(len(tensors[f"{name.removesuffix('.bias')}.weight"]))
        return tensors[name]

    return {entry.ours: tensor(entry.ours) for entry in entries}
