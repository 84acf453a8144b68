"""A model of ours as an equal one in the form of GPT-2 and BERT: learned positions, no scale, biases, segments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from transduce.config import BertSettings, EncoderSettings, ModelSettings, OutputSettings
from transduce.convert.weight_map import Line
from transduce.nn.positions import POSITIONS

SettingsT = TypeVar("SettingsT", bound=ModelSettings)


def plain_form(s: SettingsT, tensors: Mapping[str, Tensor]) -> tuple[SettingsT, dict[str, Tensor]]:
    """Settings and tensors of an equal model with learned positions and embeddings as they are, up to `max_positions`.

    A scale goes into the embeddings, which then are no longer the output matrix. What is so already stays, bit by bit.
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
    """The vectors [max_positions, D] that positions which are computed add."""
    made = POSITIONS[s.positions](d_model=s.d_model, d_head=s.d_head, max_positions=s.max_positions)
    return made.add(torch.zeros(1, s.max_positions, s.d_model), 0)[0]


def for_table(tensors: Mapping[str, Tensor], lines: Sequence[Line]) -> dict[str, Tensor]:
    """The tensors that a table asks for; biases that the model has not are zero."""

    def tensor(name: str) -> Tensor:
        weight, is_bias = name.removesuffix(".bias"), name.endswith(".bias")
        return torch.zeros(len(tensors[f"{weight}.weight"])) if is_bias and name not in tensors else tensors[name]

    return {line.ours: tensor(line.ours) for line in lines}
