"""Marian, BERT and GPT-2 of transformers compared with ours, float32: random configurations, padded batches, one step.

More of them, with the largest differences: TRANSDUCE_MODELS=200 pytest -s tests/oracle/test_random_models.py
"""

import os
import shutil
from pathlib import Path

import pytest

from oracle import quiet_transformers  # noqa: F401  skips this module without transformers
from oracle.twins import FAMILIES, LARGER, TINY

N_MODELS = int(os.environ.get("TRANSDUCE_MODELS", "10"))
EVERY = 5
"""One configuration in this many is larger."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_numbers_and_gradients(tmp_path: Path, family: str) -> None:
    worst = {"logits, tiny": 0.0, "logits, larger": 0.0, "loss": 0.0, "gradients": 0.0, "gradients, relu": 0.0}
    for seed in range(N_MODELS):
        larger = seed % EVERY == EVERY - 1
        twins = FAMILIES[family](tmp_path / "theirs", seed, larger)
        logits, loss, gradients = twins.differences()
        size = "logits, larger" if larger else "logits, tiny"
        step = "gradients, relu" if twins.kinked else "gradients"
        for name, value in ((size, logits), ("loss", loss), (step, gradients)):
            worst[name] = max(worst[name], value)
        assert logits <= (LARGER if larger else TINY), f"{family} {seed}: logits differ by {logits:.1e}"
        assert loss <= 1e-5, f"{family} {seed}: the loss differs by {loss:.1e} of itself"
        assert gradients <= (5e-3 if twins.kinked else 1e-4), (
            f"{family} {seed}: a gradient differs by {gradients:.1e} of its largest"
        )
        shutil.rmtree(tmp_path / "theirs")
    largest = "; ".join(f"{name} {value:.1e}" for name, value in worst.items())
    print(f"\n{family}: {N_MODELS} models; the largest differences: {largest}")
