import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transduce.config.settings import TrainingSettings
from transduce.training.schedule import SCHEDULES, Limits, Moment


def factors(name: str, *, warmup: int, updates: int) -> list[float]:
    return [SCHEDULES[name](Moment(done, done / updates, warmup)) for done in range(updates)]


def test_inverse_sqrt_is_the_papers_formula() -> None:
    d_model, warmup, updates = 512, 40, 400
    peak = (d_model * warmup) ** -0.5
    for done, factor in enumerate(factors("inverse_sqrt", warmup=warmup, updates=updates)):
        number = done + 1
        paper = d_model**-0.5 * min(number**-0.5, number * warmup**-1.5)
        assert factor * peak == pytest.approx(paper, rel=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_every_schedule_rises_linearly_to_the_peak_and_then_never_rises(name: str, warmup: int) -> None:
    values = factors(name, warmup=warmup, updates=50)
    assert values[: max(0, warmup - 1)] == pytest.approx([(n + 1) / warmup for n in range(max(0, warmup - 1))])
    assert max(values) == values[max(0, warmup - 1)] == 1.0
    after = values[max(0, warmup - 1) :]
    assert all(a >= b for a, b in pairwise(after))
    assert min(values) > 0


@pytest.mark.parametrize(("name", "middle"), [("linear", 0.5), ("cosine", 0.5), ("constant", 1.0)])
def test_shapes_half_way_and_at_the_end(name: str, middle: float) -> None:
    warmup, updates = 100, 1100
    schedule = SCHEDULES[name]
    assert schedule(Moment(600, 600 / updates, warmup)) == pytest.approx(middle)
    end = schedule(Moment(updates, 1.0, warmup))
    assert end == pytest.approx(1.0 if name == "constant" else 0.0, abs=1e-12)


def test_cosine_a_quarter_of_the_way() -> None:
    assert SCHEDULES["cosine"](Moment(350, 350 / 1100, 100)) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_time_limit_ends_at_zero_once_it_is_a_number_of_updates(name: str) -> None:
    """The number is known from update 30 on; before it the factor stays at its peak."""
    limits, warmup, n = Limits(seconds=100.0), 10, 400
    shares = [limits.progress(updates=i, epochs=0.0, timed_updates=n if i >= 30 else None) for i in range(n + 1)]
    values = [SCHEDULES[name](Moment(i, share, warmup)) for i, share in enumerate(shares)]
    assert values[warmup:30] == [1.0] * 20
    assert values[-1] == pytest.approx(0.0, abs=1e-12)
    assert all(a >= b - 1e-12 for a, b in pairwise(values[warmup:]))


@given(
    done=st.integers(0, 10**6),
    warmup=st.integers(0, 10**6),
    progress=st.floats(0, 1),
    name=st.sampled_from(list(SCHEDULES)),
)
def test_factors_stay_between_zero_and_one(done: int, warmup: int, progress: float, name: str) -> None:
    assert 0.0 <= SCHEDULES[name](Moment(done, progress, warmup)) <= 1.0


def test_progress_follows_the_limit_that_comes_first() -> None:
    limits = Limits(updates=100, epochs=4.0, seconds=60.0)
    assert limits.progress(updates=50, epochs=1.0) == 0.5
    assert limits.progress(updates=10, epochs=3.0) == 0.75
    assert limits.progress(updates=45, epochs=1.0, timed_updates=50) == 0.9
    assert limits.progress(updates=101, epochs=1.0) == 1.0


def test_the_clock_ends_a_late_run_earlier_by_a_reserve_of_at_most_half() -> None:
    limits = Limits(seconds=60.0)
    assert limits.is_late(60.0) and not limits.is_late(59.0)
    assert limits.is_late(45.0, reserve=15.0) and not limits.is_late(44.0, reserve=15.0)
    assert limits.is_late(55.0, began=50.0, reserve=30.0) and not limits.is_late(54.0, began=50.0, reserve=30.0)
    assert limits.is_late(30.0, reserve=300.0) and not limits.is_late(29.0, reserve=300.0)
    assert not Limits(updates=3).is_late(1e9)


def test_limits_come_from_the_settings() -> None:
    assert Limits.of(TrainingSettings(max_minutes=2, max_updates=5)) == Limits(updates=5, seconds=120.0)
