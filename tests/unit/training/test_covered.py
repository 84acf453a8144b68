"""Which models train with the native kernels in float32: those whose work the kernels do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from native_engines import needs_training_kernels
from oracle.adapter import fitting
from transduce.config.settings import TrainingSettings
from transduce.models.registry import build_model
from transduce.training.step import Updater

pytestmark = needs_training_kernels


@pytest.mark.parametrize(
    ("options", "covered"),
    [
        ({}, True),
        ({"residual": "pre", "norm": "rms", "feed_forward": "gated", "n_kv_heads": 2, "positions": "rotary"}, True),
        ({"projection": "shared"}, True),
        ({"kind": "bert"}, True),
        ({"decoder_self": "ssru"}, False),
        ({"feed_forward": "conv"}, False),
        ({"positions": "shaw"}, False),
        ({"positions": "t5"}, False),
        ({"encoder_pattern": "local", "window": 4}, False),
        ({"kind": "gpt", "decoder_pattern": "fixed", "window": 4, "summary": 2}, False),
        ({"kind": "star"}, False),
        ({"kind": "star-classifier", "n_labels": 2}, False),
        ({"kind": "convs2s"}, False),
    ],
    ids=str,
)
def test_float32_training_uses_the_kernels_where_they_do_most_of_the_work(
    options: dict[str, Any], covered: bool
) -> None:
    """Elsewhere a change of thread pools would cost more than the kernels gain."""
    sizes = {"d_model": 32, "n_heads": 4, "n_encoder_layers": 1, "n_decoder_layers": 1}
    model = build_model(fitting(**{**sizes, **options}), n_src=40, n_tgt=40)
    cpu, settings = torch.device("cpu"), TrainingSettings(optimizer="adam", lr=1e-3)
    assert (Updater(model, settings, device=cpu, precision="float32").kernels != "torch") == covered
