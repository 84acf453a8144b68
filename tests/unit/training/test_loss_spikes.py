"""Losses as in real runs: noise, spikes and warm-up are accepted; divergence is found with its first update."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from transduce.training.feed import Position
from transduce.training.loss_spikes import BadLoss, Suspect, Watch


def show(watch: Watch, losses: list[float], *, first: int = 1) -> None:
    for update, loss in enumerate(losses, first):
        watch.see(Suspect(update, loss, 0, update - 1), lr=1e-3, grad_norm=1.0)


def learning(n: int, *, start: float = 9.2, end: float = 4.0, noise: float = 0.1, seed: int = 0) -> list[float]:
    """A curve that falls from `start` towards `end`."""
    draw = np.random.default_rng(seed)
    return [end + (start - end) * math.exp(-i / 60) + noise * draw.standard_normal() for i in range(n)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.01, 0.1, 0.5])
def test_ordinary_learning_is_not_an_explosion(seed: int, noise: float) -> None:
    show(Watch(), learning(1000, noise=noise, seed=seed))


def test_single_odd_batches_are_not_an_explosion() -> None:
    losses = learning(500)
    losses[300::25] = [9.0] * len(losses[300::25])
    show(Watch(), losses)


def test_a_rise_during_the_warm_up_of_a_fine_tuning_is_not_an_explosion() -> None:
    bump = [2.0 + 0.3 * math.sin(math.pi * i / 80) for i in range(80)]
    show(Watch(), [2.0] * 80 + bump + [1.9] * 80)


def test_rare_large_losses_of_a_classifier_are_not_an_explosion() -> None:
    """Confident and wrong predictions in small batches of a fine-tuned classifier."""
    draw = np.random.default_rng(3)
    show(Watch(), [0.7] * 10 + [float(draw.choice([0.02, 0.05, 1.5], p=[0.6, 0.37, 0.03])) for _ in range(2000)])


@pytest.mark.parametrize("up_to", [6.8, 9.0, 30.0])
def test_divergence_and_its_first_update_are_found_within_ten_updates(up_to: float) -> None:
    watch, losses = Watch(), learning(400)
    with pytest.raises(BadLoss, match="spikes") as caught:
        show(watch, losses + [up_to] * 30)
    suspects = caught.value.suspects
    assert suspects[0].update == 400, "the update before the first high loss made the step that led to it"
    assert suspects[0].position == Position(0, 399)
    assert 401 <= suspects[-1].update <= 410
    assert caught.value.usual == pytest.approx(4.0, abs=0.1)


@pytest.mark.parametrize(("first", "up_to"), [(5.7, 34_195.0), (5.7, 18.0), (10.4, 32.0), (0.01, 16.0), (40.0, 130.0)])
@pytest.mark.parametrize("at", [2, 5, 30])
def test_divergence_in_the_first_updates_is_found_after_ten(first: float, up_to: float, at: int) -> None:
    losses = [first] * (at - 1) + [up_to * (1 + i) for i in range(100)]
    with pytest.raises(BadLoss, match="spikes") as caught:
        show(Watch(), losses)
    assert [one.update for one in caught.value.suspects] == list(range(at - 1, at + 10))
    assert caught.value.usual == pytest.approx(first)
    show(Watch(k=0.0), losses)


@pytest.mark.parametrize("first", [0.0, 0.05, 0.7, 5.7, 10.4, 22.0])
def test_a_bump_at_the_start_is_not_an_explosion(first: float) -> None:
    short, low = [1000.0] * 9, [max(2.9 * first, 14.0)] * 30
    show(Watch(), [first, *short, first, *short, *[first] * 60])
    show(Watch(), [first, *low, *[first] * 10])


def test_the_number_of_deviations_is_a_setting() -> None:
    losses = learning(400) + [7.5] * 30
    show(Watch(k=0.0), losses)
    with pytest.raises(BadLoss):
        show(Watch(k=20.0), losses)
    show(Watch(k=100.0), losses)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_losses_are_reported_at_once_even_without_explosion_detection(bad: float) -> None:
    with pytest.raises(BadLoss, match="not finite") as caught:
        show(Watch(k=0.0), [3.0, bad])
    assert [suspect.update for suspect in caught.value.suspects] == [2]


@pytest.mark.parametrize("cut", [1, 4, 10])
def test_a_restored_watch_remembers_the_first_losses(cut: int) -> None:
    losses = [6.0, 6.1, *[1e4] * 20]
    watch, other = Watch(), Watch()
    show(watch, losses[:cut])
    other.load(json.loads(json.dumps(watch.state())))
    with pytest.raises(BadLoss) as caught:
        show(other, losses[cut:], first=cut + 1)
    assert caught.value.suspects[-1].update == 12 and caught.value.suspects[0].update == 2


@pytest.mark.parametrize("cut", [5, 200, 403])
def test_a_restored_watch_decides_as_the_original(cut: int) -> None:
    losses, found = learning(400) + [8.0] * 20, []
    for saves in (False, True):
        watch = Watch()
        show(watch, losses[:cut])
        if saves:
            other = Watch()
            other.load(json.loads(json.dumps(watch.state())))
            watch = other
        with pytest.raises(BadLoss) as caught:
            show(watch, losses[cut:], first=cut + 1)
        found.append(caught.value.suspects)
    assert found[0] == found[1]


def test_a_state_of_an_early_version_restores_to_an_empty_watch() -> None:
    watch = Watch()
    watch.load({})
    assert (watch.first, watch.last) == ([], [])
