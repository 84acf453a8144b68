"""The cost model for GPUs, compared with published trainings."""

from __future__ import annotations

from typing import Any

import pytest

from transduce.config.kinds import model_settings, resolve_preset
from transduce.doctor.cluster import BYTES_PER_PARAMETER, GPUS, PASSES, PUBLISHED, ROOM_ON_GPU, Cluster, forecast
from transduce.errors import SettingsError
from transduce.models.registry import ARCHITECTURES

GPT2 = {"kind": "gpt", "n_decoder_layers": 12, "d_model": 768, "d_ff": 3072, "n_heads": 12}
TRAININGS: list[tuple[dict[str, Any], Cluster, dict[str, Any], float]] = [
    # Vaswani et al. 2017, section 5: 100,000 updates in 12 hours, 300,000 in 3.5 days, of about 25,000 tokens per side
    ({"preset": "base"}, Cluster("p100", 8), {"vocab_size": 37_000, "targets": 25_000}, 12 * 3600 / 100_000),
    ({"preset": "big"}, Cluster("p100", 8), {"vocab_size": 37_000, "targets": 25_000}, 84 * 3600 / 300_000),
    # Ott et al. 2018, table 1: updates of 402,000 tokens at 1.82 million tokens per second (quoted from memory)
    (
        {"preset": "big"},
        Cluster("v100", 8, 16),
        {"vocab_size": 32_768, "targets": 402_000},
        0.402 / 1.82,
    ),
    # nanoGPT's README and config/train_gpt2.py: 600,000 updates of 491,520 tokens in about 4 days
    (GPT2, Cluster("a100", 8), {"vocab_size": 50_304, "targets": 491_520, "context": 1024}, 4 * 86400 / 6e5),
]


@pytest.mark.parametrize(("model", "cluster", "training", "seconds"), TRAININGS)
def test_published_trainings_are_predicted_within_30_percent(
    model: dict[str, Any], cluster: Cluster, training: dict[str, Any], seconds: float
) -> None:
    """They did not use our kernels."""
    found = forecast(resolve_preset(model_settings(**model)), cluster, passes=PASSES, **training)
    ratio = found.seconds_per_update / seconds
    print(f"{found.seconds_per_update:.3f} s, published {seconds:.3f} s: {ratio - 1:+.0%}")
    assert 0.7 < ratio < 1.3 and PUBLISHED[0] <= round(1 / ratio, 2) <= PUBLISHED[1]


def test_our_own_update_on_an_h100_is_predicted_within_20_percent() -> None:
    base = resolve_preset(model_settings(preset="base"))
    found = forecast(base, Cluster("h100", 1), vocab_size=37_000, targets=21_775)  # as in benchmarks/README.md
    assert found.seconds_per_update == pytest.approx(0.0412, rel=0.2)


@pytest.mark.parametrize(("gpu", "numbers"), [("a100", (0,)), ("a100", (8, -1)), ("k80", (8,))])
def test_impossible_clusters_are_refused(gpu: str, numbers: tuple[int, ...]) -> None:
    with pytest.raises(SettingsError, match=r"at least 1|allowed: p100"):
        Cluster(gpu, *numbers)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_architecture_has_a_forecast(kind: str) -> None:
    labels = {"n_labels": 3} if kind.endswith("classifier") else {}
    model = resolve_preset(model_settings(kind=kind, **labels))
    found = forecast(model, Cluster("a100", 2), vocab_size=8000, targets=4096)
    assert 0 < found.seconds_per_update < 1 and found.memory > 0 and found.largest > 0


def test_more_gpus_are_faster_and_a_model_of_the_largest_size_fits() -> None:
    base = resolve_preset(model_settings(preset="base"))
    one, many = (forecast(base, Cluster("h100", n), vocab_size=32_000, targets=25_000) for n in (1, 8))
    assert 3 < many.tokens_per_second / one.tokens_per_second < 8
    assert one.memory > many.memory
    assert BYTES_PER_PARAMETER * one.largest < ROOM_ON_GPU * GPUS["h100"].memory


def test_gpus_that_shard_a_model_divide_its_memory() -> None:
    base, cluster = resolve_preset(model_settings(preset="base")), Cluster("h100", 8)
    one, eight = (forecast(base, cluster, vocab_size=32_000, targets=25_000, shards=n) for n in (1, 8))
    assert eight.memory < one.memory < 8 * eight.memory
    assert one.largest < eight.largest < 8 * one.largest
    assert eight.seconds_per_update == one.seconds_per_update
