"""Which models the native library trains with all threads: those whose stacks it computes."""

from typing import Any

import pytest
import torch

from native_engines import needs_training_kernels
from oracle.adapter import fitting
from transduce.config.settings import TrainingSettings
from transduce.kernels.accelerate import is_covered
from transduce.models.registry import build_model
from transduce.training.step import Updater

pytestmark = needs_training_kernels


@pytest.mark.parametrize(
    ("options", "covered"),
    [
        ({}, True),
        ({"residual": "pre", "norm": "rms", "feed_forward": "gated", "n_kv_heads": 2, "positions": "rotary"}, True),
        ({"projection": "shared"}, False),
        ({"kind": "bert"}, True),
        ({"kind": "gpt"}, True),
        ({"decoder_self": "ssru"}, True),
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
def test_the_library_computes_the_stacks_of_plain_transformers(options: dict[str, Any], covered: bool) -> None:
    sizes = {"d_model": 32, "n_heads": 4, "n_encoder_layers": 1, "n_decoder_layers": 1}
    model = build_model(fitting(**{**sizes, **options}), n_src=40, n_tgt=40)
    cpu, settings = torch.device("cpu"), TrainingSettings(optimizer="adam", lr=1e-3)
    updater = Updater(model, settings, device=cpu, precision="float32")
    assert updater.kernels != "torch" and is_covered(model) == covered
