"""Heat maps: every cell shows its weight, in the picture and in the embedded data."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from transduce.inspection.heatmap import OPACITY_POWER, HeatMap, heat_map_figures, heat_map_svg

SVG = "{http://www.w3.org/2000/svg}"


def some_map() -> HeatMap:
    weights = np.random.default_rng(1).dirichlet(np.ones(3), size=(2, 4, 5)).astype(np.float32)  # [L, H, R, C]
    return HeatMap("a map", ("r0", "<r1>", "r2", "r3", "r4"), ("c0", "c&1", "c2"), weights)


def cells(svg: str) -> np.ndarray:
    """Read weights back from a picture."""
    found = [r.attrib for r in ET.fromstring(svg).iter(f"{SVG}rect") if r.attrib.get("class") != "frame"]
    places = sorted((float(r["y"]), float(r["x"]), float(r["fill-opacity"])) for r in found)
    return np.array([opacity for *_, opacity in places]).reshape(5, 3) ** (1 / OPACITY_POWER)


@pytest.mark.parametrize(("layer", "head"), [(0, 1), (-1, None), (None, None), (None, 3)])
def test_the_picture_shows_the_weights(layer: int | None, head: int | None) -> None:
    heat = some_map()
    expected = heat.weights if layer is None else heat.weights[layer : layer + 1 or None]
    expected = expected.mean(0)
    expected = expected.mean(0) if head is None else expected[head]
    np.testing.assert_allclose(heat.view(layer, head), expected, rtol=1e-6)
    np.testing.assert_allclose(cells(heat_map_svg(heat, layer=layer, head=head)), np.maximum(expected, 0.01), atol=0.01)


def test_labels_are_escaped() -> None:
    texts = ["".join(t.itertext()) for t in ET.fromstring(heat_map_svg(some_map())).iter(f"{SVG}text")]
    assert texts == ["c0", "c&1", "c2", "r0", "<r1>", "r2", "r3", "r4"]


def test_json_keeps_weights_to_one_byte() -> None:
    heat = some_map()
    back = HeatMap.from_json(json.loads(json.dumps(heat.to_json())))
    assert (back.name, back.rows, back.columns) == (heat.name, heat.rows, heat.columns)
    np.testing.assert_allclose(back.weights, heat.weights, atol=0.5 / 255 + 1e-6)


def test_the_page_contains_the_weights() -> None:
    figures = heat_map_figures([some_map()])
    (data,) = re.findall(r'<script type="application/json" class="weights">(.*?)</script>', figures)
    np.testing.assert_allclose(HeatMap.from_json(json.loads(data)).weights, some_map().weights, atol=0.003)
    assert figures.count("<option") == (2 + 1) + (4 + 1)


# --- pages


def test_hostile_labels_stay_text() -> None:
    hostile = "</script><script>alert(1)</script><!-- & ' \" \u2028 \udcff"
    heat = HeatMap(hostile, (hostile,), ("c",), np.ones((1, 1, 1, 1), np.float32))
    text = heat_map_figures([heat])
    assert text.count("<script") == text.count("</script>") == 1 and "<!--" not in text
    text.encode("utf-8")
    (data,) = re.findall(r'class="weights">(.*?)</script>', text)
    assert json.loads(data)["rows"] == [hostile]
