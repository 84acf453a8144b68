"""Charts draw points at their values."""

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transduce.evaluation.html import Curve, line_chart, smooth, thin, ticks


def svg_of(figure: str) -> ET.Element:
    found = re.search(r"<svg.*</svg>", figure, re.DOTALL)
    assert found is not None
    return ET.fromstring(found[0])


def lines_of(figure: str) -> list[list[tuple[float, float]]]:
    places = [line.attrib["points"] for line in svg_of(figure).iter("polyline")]
    return [[(float(x), float(y)) for x, y in (p.split(",") for p in place.split())] for place in places]


def axis(figure: str, *, vertical: bool) -> list[tuple[float, float]]:
    """Read (place, value) of the numbers along an axis back from the chart."""
    texts = [(t.attrib, float(t.text or "")) for t in svg_of(figure).iter("text")]
    if vertical:
        return [(float(a["y"]) - 4, v) for a, v in texts if a["text-anchor"] == "end" and float(a["x"]) < 50]
    return [(float(a["x"]), v) for a, v in texts if a["text-anchor"] == "middle"]


def test_points_are_drawn_at_their_values() -> None:
    points = [(0.0, 1.0), (50.0, 4.0), (100.0, 2.0)]
    figure = line_chart("a chart", [Curve("c", points)])
    (line,) = lines_of(figure)
    for vertical in (False, True):
        (p, v), *_, (q, w) = axis(figure, vertical=vertical)
        for place, point in zip(line, points, strict=True):
            value = v + (place[vertical] - p) / (q - p) * (w - v)
            assert value == pytest.approx(point[vertical], abs=0.05)


def test_higher_values_are_higher() -> None:
    (line,) = lines_of(line_chart("a chart", [Curve("c", [(0, 0.0), (1, 1.0), (2, 2.0)])]))
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    assert [y for _, y in line] == sorted((y for _, y in line), reverse=True)


@pytest.mark.parametrize("curves", [[], [Curve("c", [])], [Curve("c", [(1, math.nan), (2, math.inf)])]])
def test_no_points_make_no_chart(curves: list[Curve]) -> None:
    assert line_chart("a chart", curves) == ""


def test_nonfinite_values_are_skipped() -> None:
    (line,) = lines_of(line_chart("a chart", [Curve("c", [(0, 1.0), (1, math.nan), (2, 3.0)])]))
    assert len(line) == 2


@given(st.lists(st.tuples(st.floats(0, 1e7), st.floats(-1e12, 1e12)), min_size=1, max_size=30))
def test_any_values_make_a_chart(points: list[tuple[float, float]]) -> None:
    figure = line_chart("a chart", [Curve("c", sorted(points))])
    numbers = [n for line in lines_of(figure) for point in line for n in point]
    assert all(map(math.isfinite, numbers))
    assert all(0 <= n <= 520 for n in numbers)


def test_names_are_escaped() -> None:
    figure = line_chart("<b>", [Curve("</script>", [(0, 1)]), Curve("<i>", [(0, 1)])])
    assert "<b></b>" not in figure and figure.count("</script>") == 1 and "<i>" not in figure


def test_initial_values_may_leave_the_chart() -> None:
    falling = [(float(i), 1000.0 if i == 0 else 2 + 1 / i) for i in range(100)]
    top = max(v for _, v in axis(line_chart("a chart", [Curve("c", falling)], settle=0.05), vertical=True))
    assert top < 3


def test_restarts_are_marked() -> None:
    figure = line_chart("a chart", [Curve("c", [(0, 1), (10, 2)])], marks=[5.0, 99.0])
    assert figure.count("<title>restart</title>") == 1


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9), st.integers(3, 8))
def test_ticks_are_few_round_and_span_the_range(low: float, span: float, n: int) -> None:
    found = ticks(low, low + span, n)
    step = found[1] - found[0]
    assert 2 <= len(found) <= n + 2
    assert step > 0
    assert found[0] <= low + 1e-6 * step and found[-1] >= low + span - 1e-6 * step


def test_thinning_keeps_the_mean_and_the_end() -> None:
    points = [(float(i), float(i % 7)) for i in range(10_000)]
    few = thin(points, 100)
    assert len(few) <= 100 and few[-1] == points[-1]
    assert sum(y for _, y in few[:-1]) / len(few[:-1]) == pytest.approx(3.0, abs=0.05)
    assert thin(points[:50], 100) == points[:50]


def test_a_moving_average_lags_and_does_not_look_ahead() -> None:
    step = [(float(i), float(i >= 5)) for i in range(10)]
    assert [y for _, y in smooth(step, window=4)] == [0, 0, 0, 0, 0, 0.25, 0.5, 0.75, 1, 1]
