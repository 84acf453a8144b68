"""Captured weights are those that the model used; analyses of them and pictures."""

import copy
import re
import threading
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from rich.cells import cell_len

from attentions import attention_maps
from oracle.numpy_transformer import Options, alibi, rotate, seen_by, sinusoid, t5_bucket
from text_runs import make_run
from transduce.config.architectures import model_settings
from transduce.data.batch import collate
from transduce.data.store import Example
from transduce.errors import UserError
from transduce.inspection.inspected_models import open_subject
from transduce.inspection.inspection import inspect_sentence
from transduce.inspection.page import theme_colour
from transduce.inspection.pictures import LEGEND, LEVELS, SHADES, averaged_attention, picture, save_picture, shade
from transduce.inspection.recorded_modules import unpack
from transduce.models.registry import build_model
from transduce.nn.recording import record

SRC = torch.tensor([[5, 9, 11, 7, 3]])
TGT_IN = torch.tensor([[2, 8, 6, 10]])
OPTIONS: list[dict[str, Any]] = [
    {},
    {"residual": "pre", "n_kv_heads": 2, "positions": "rotary"},
    {"projection": "shared", "norm": "rms"},
    {"n_encoder_layers": 1, "n_decoder_layers": 3, "attention_dropout": 0.5},
]


def a_model(**options: Any) -> torch.nn.Module:
    sizes = {"d_model": 16, "d_ff": 32, "n_heads": 4, "n_encoder_layers": 2, "n_decoder_layers": 2}
    return build_model(model_settings(**(sizes | options)), n_src=20, n_tgt=20)


@pytest.mark.parametrize("options", OPTIONS)
def test_rows_sum_to_one_and_the_decoder_is_causal(options: dict[str, Any]) -> None:
    model = a_model(**options)
    maps = attention_maps(model, SRC, TGT_IN)
    n_encoder, n_decoder = options.get("n_encoder_layers", 2), options.get("n_decoder_layers", 2)
    assert maps["encoder"].shape == (n_encoder, 4, 5, 5)
    assert maps["decoder"].shape == (n_decoder, 4, 4, 4)
    assert maps["cross"].shape == (n_decoder, 4, 4, 5)
    for weights in maps.values():
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert np.triu(maps["decoder"], 1).max() == 0


def test_a_decoder_with_ssru_has_no_self_attention() -> None:
    maps = attention_maps(a_model(decoder_self="ssru"), SRC, TGT_IN)
    assert maps.keys() == {"encoder", "cross"} and maps["cross"].shape == (2, 4, 4, 5)


def test_recording_does_not_change_the_model() -> None:
    model = a_model(dropout=0.3).eval()
    with torch.no_grad():
        before = model(SRC, TGT_IN)
        with record(model):
            assert torch.equal(model(SRC, TGT_IN), before)
        assert torch.equal(model(SRC, TGT_IN), before)
    model.train()
    attention_maps(model, SRC, TGT_IN)
    assert model.training
    assert not [m for m in model.modules() if "attend" in vars(m)], "the model is restored"


def test_an_error_restores_the_model() -> None:
    model = a_model()
    with pytest.raises(IndexError):
        attention_maps(model, torch.tensor([[99, 3]]), TGT_IN)
    assert not [m for m in model.modules() if "attend" in vars(m)]
    attention_maps(model, SRC, TGT_IN)


def test_other_threads_are_not_recorded() -> None:
    model = a_model().eval()
    with torch.no_grad(), record(model, "*.weights") as weights:
        thread = threading.Thread(target=lambda: model(SRC, TGT_IN))
        thread.start()
        thread.join()
        assert not weights
        model(SRC, TGT_IN)
    assert len(weights) == 2 + 2 * 2


TEXT = "the cat sat on a mat"
_FEED_FORWARD = {"feed_forward", "feed_forward.expand"}
_CROSS = {f"cross_attention{point}" for point in ("", ".query", ".key", ".value", ".heads", ".scores")}
_SELF = {f"self_attention{point}" for point in ("", ".query", ".key", ".value", ".heads", ".scores")}
_SELF |= {"logits"}
ALL = _SELF | _CROSS | _FEED_FORWARD
PRODUCTS: list[tuple[dict[str, Any], set[str]]] = [
    ({"kind": "transformer"}, ALL),
    ({"kind": "transformer", "n_kv_heads": 1, "positions": "alibi"}, ALL),
    ({"kind": "transformer", "positions": "rotary"}, ALL - {"self_attention.query", "self_attention.key"}),
    ({"kind": "transformer", "positions": "shaw"}, ALL - {"self_attention.heads"}),
    ({"kind": "gpt"}, _SELF | _FEED_FORWARD),
    ({"kind": "transformer-xl"}, _FEED_FORWARD | _SELF - {f"self_attention.{x}" for x in ("query", "key", "value")}),
    ({"kind": "rnn"}, {"logits"}),
]


@pytest.mark.parametrize(("options", "expected"), PRODUCTS)
def test_the_cells_that_have_a_dot_product(options: dict[str, Any], expected: set[str], tmp_path: Any) -> None:
    """Queries and keys that are rotated, outputs with Shaw's vectors, and all cells of an RNN are not only products."""
    found, shown = inspect_sentence(open_subject(make_run(tmp_path / "run", **options)), TEXT), set()
    random = np.random.default_rng(1)
    for part in found.parts:
        for name, value in part.values.items():
            products = [found.cell(name, random.integers(value.shape).tolist()) for _ in range(6)]
            if all(products):
                shown.add(part.kind.kind + name.removeprefix(part.name))
            assert all(products) == any(products), name
    assert shown == expected


def encoder_positions(tmp_path: Any, scheme: str) -> tuple[dict[str, Any], Any]:
    subject = open_subject(make_run(tmp_path / "run", kind="transformer", positions=scheme))
    found = inspect_sentence(subject, TEXT)
    return next(one for one in found.views["positions"] if one["stack"] == "encoder"), subject.model


def test_sinusoids_and_their_dot_products_are_the_equation(tmp_path: Any) -> None:
    view, _ = encoder_positions(tmp_path, "sinusoidal")
    expected = sinusoid(*view["table"]["shape"])
    np.testing.assert_allclose(unpack(view["table"]), expected, atol=1e-3)
    np.testing.assert_allclose(unpack(view["dots"]), expected @ expected.T, rtol=1e-3, atol=5e-3)
    assert view["bias"] is None


def test_learned_positions_are_the_weights(tmp_path: Any) -> None:
    view, model = encoder_positions(tmp_path, "learned")
    n, _ = view["table"]["shape"]
    (weights,) = (value for name, value in model.state_dict().items() if name.startswith("src_embedding.positions"))
    np.testing.assert_allclose(unpack(view["table"]), weights[:n], rtol=1e-3, atol=1e-4)


def test_rotary_positions_turn_a_vector_of_ones(tmp_path: Any) -> None:
    """The two numbers of a pair are half a width apart."""
    view, _ = encoder_positions(tmp_path, "rotary")
    pairs = rotate(np.ones(view["table"]["shape"]))
    expected = np.concatenate([pairs[:, 0::2], pairs[:, 1::2]], 1)
    np.testing.assert_allclose(unpack(view["table"]), expected, atol=1e-3)


def test_biases_of_scores_are_the_equations(tmp_path: Any) -> None:
    view, _ = encoder_positions(tmp_path / "alibi", "alibi")
    n_heads, n, _ = view["bias"]["shape"]
    expected = np.stack([alibi(n, head, n_heads) for head in range(n_heads)])
    np.testing.assert_allclose(unpack(view["bias"]), expected, rtol=1e-3, atol=1e-3)
    assert view["table"] is None
    view, model = encoder_positions(tmp_path / "t5", "t5")
    buckets = [[t5_bucket(t - s, causal=False) for s in range(n)] for t in range(n)]
    (table,) = (value for value in model.src_embedding.positions.state_dict().values())
    expected = table.numpy()[np.array(buckets)].transpose(2, 0, 1)
    np.testing.assert_allclose(unpack(view["bias"]), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("pattern", ["full", "local"])
def test_masks_are_those_of_the_patterns(pattern: str, tmp_path: Any) -> None:
    sizes = {"n_heads": 4, "window": 2 if pattern == "local" else 0}
    patterns = {"encoder": pattern, "decoder": pattern}
    given = {f"{stack}_pattern": one for stack, one in patterns.items()} | sizes
    run = make_run(tmp_path / "run", kind="transformer", **{key: value for key, value in given.items() if value})
    found = inspect_sentence(open_subject(run), TEXT, "a mat on a cat")
    options = Options(n_kv_heads=4, n_encoder_layers=2, n_decoder_layers=2, patterns=patterns, **sizes)
    for view in found.views["masks"]:
        mask, stack = unpack(view["mask"]), view["title"].split()[0]
        is_cross = "cross" in view["title"]
        expected = np.ones(mask.shape) if is_cross else seen_by(len(mask), options, stack, 0)[0]
        np.testing.assert_array_equal(mask, expected)
    assert {view["title"] for view in found.views["masks"]} >= {"decoder self-attention"}


@pytest.mark.parametrize(
    "options", [{}, {"residual": "pre", "norm": "rms"}, {"kind": "gpt"}, {"kind": "bert"}], ids=str
)
def test_the_lens_of_a_layer_is_a_model_without_the_later_layers(options: dict[str, Any], tmp_path: Any) -> None:
    """In float64."""
    subject = open_subject(make_run(tmp_path / "run", **({"kind": "transformer"} | options)))
    found = inspect_sentence(subject, TEXT)
    layers = found.views["lens"]["layers"]
    for n, shown in enumerate(layers):
        short = copy.deepcopy(subject.model).double()
        stack = getattr(short, subject.stack)
        stack.blocks = stack.blocks[:n]
        with torch.no_grad():
            logits = subject.logits(short, subject.hidden(short, *found.sentence.inputs))[0]
        expected = logits.softmax(-1)
        rows = torch.arange(len(expected))
        np.testing.assert_allclose(
            unpack(shown["probability"]), expected[rows, found.sentence.targets], rtol=2e-3, atol=1e-5
        )
        assert [p for _, p in shown["top"][0]] == pytest.approx(expected[0].topk(5).values.tolist(), rel=1e-3)
    assert len(layers) >= 2


def test_what_a_part_does_is_shown_as_a_change_of_the_log_probability(tmp_path: Any) -> None:
    subject = open_subject(make_run(tmp_path / "run", kind="transformer"))
    off = ["encoder.blocks.0.feed_forward"]
    whole, without = inspect_sentence(subject, TEXT, "a mat"), inspect_sentence(subject, TEXT, "a mat", off=off)
    log_prob = sum(np.log(token["probability"]) for token in whole.views["tokens"])
    assert without.views["original"] == {"text": "a mat", "log_prob": pytest.approx(log_prob, abs=1e-4)}


COLUMNS = ["▁A", "▁dog", "▁runs", "▁.", "</s>"]


def cells_of(line: str, left: int) -> list[str]:
    line = line.ljust(left + 2 * len(COLUMNS))
    return [line[left + 2 * i : left + 2 * i + 2] for i in range(len(COLUMNS))]


def test_cells_are_below_their_headings() -> None:
    rows = ["▁Ein", "▁Hund", "▁läuft"]
    weights = np.array([[0.9, 0.05, 0, 0, 0.05], [0, 1, 0, 0, 0], [0.1, 0.1, 0.4, 0.2, 0.2]])
    lines = picture(rows, COLUMNS, weights).split("\n")
    n_heading, left = max(map(len, COLUMNS)), max(map(len, rows)) + 1
    for i, column in enumerate(COLUMNS):
        letters = [line.ljust(80)[left + 2 * i] for line in lines[:n_heading]]
        assert "".join(letters).strip() == column
        assert lines[n_heading].ljust(80)[left + 2 * i :][:2].strip() == str(i + 1)
    for row, line, weight in zip(rows, lines[n_heading + 1 :], weights, strict=True):
        assert line[: left - 1].strip() == row
        assert cells_of(line, left) == [shade(w) * 2 for w in weight]


def test_shades_grow_with_weights() -> None:
    assert [shade(level) for level in (0.0, *LEVELS)] == list(SHADES)
    assert shade(1.0) == SHADES[-1]
    assert all(s in LEGEND for s in SHADES[1:])


@pytest.mark.parametrize("colour", [False, True])
def test_wide_characters_and_marks_keep_the_columns(colour: bool) -> None:
    rows = ["猫", "e\u0301t\u0301e\u0301", "שלום", "x"]
    columns = ["日本語", "ต้", "a"]
    lines = picture(rows, columns, np.ones((4, 3)), colour=colour).split("\n")
    plain = [re.sub(r"\033\[[\d;]*m", "", line) for line in lines]
    rows_of_picture = plain[-4:]
    starts = {cell_len(line[: len(line) - len(line.lstrip(" "))]) for line in rows_of_picture}
    assert len(starts) > 1, "labels are aligned right"
    widths = {cell_len(line.rstrip("█ ")) + len(re.findall("█", line)) for line in rows_of_picture}
    if not colour:
        assert len({cell_len(line) for line in rows_of_picture}) == 1
        assert len(widths) == 1


def test_colour_is_optional_and_reset_on_every_line() -> None:
    weights = np.full((2, 5), 0.2)
    assert "\033" not in picture(["a", "b"], COLUMNS, weights)
    coloured = picture(["a", "b"], COLUMNS, weights, colour=True).split("\n")
    assert [line.endswith("\033[0m") for line in coloured[-2:]] == [True, True]
    assert "\033" not in "".join(coloured[:-2])


def test_a_picture_fits_the_width() -> None:
    columns = [f"piece{i}" for i in range(90)]
    text = picture(["row"] * 3, columns, np.ones((3, 90)), width=60)
    assert max(map(cell_len, text.split("\n"))) <= 60
    assert text.count("█") == 2 * 3 * 90
    tiny = picture(["a very long label that is cut"], ["x"], np.ones((1, 1)), width=4)
    assert "…" in tiny and "█" in tiny


def test_control_characters_do_not_reach_the_terminal() -> None:
    text = picture(["a\033[31m"], ["b\n\t"], np.ones((1, 1)))
    assert "\033" not in text and "\t" not in text and "b" in text


def test_no_pieces_make_an_empty_picture() -> None:
    assert picture([], [], np.zeros((0, 0))) == ""


# --- files


@pytest.mark.parametrize("kind", ["transformer", "star", "rnn"])
def test_the_picture_is_the_last_layer_averaged_over_its_heads(kind: str, tmp_path: Path) -> None:
    subject = open_subject(make_run(tmp_path / "run", kind=kind))
    found = inspect_sentence(subject, "the cat sat on a mat")
    batch = collate([Example(found.sentence.sides["src"].ids[:-1], found.sentence.targets.tolist()[:-1])])
    expected = attention_maps(subject.model, batch.src, batch.tgt_in)["cross"][-1].mean(0)
    rows, columns, weights = averaged_attention(found)
    np.testing.assert_allclose(weights, expected, atol=1e-6)
    sides = found.sentence.sides
    assert (rows, columns) == (sides["tgt_out"].tokens, (("relay",) if kind == "star" else ()) + sides["src"].tokens)


def test_an_svg_has_the_weights_and_the_tokens(tmp_path: Path) -> None:
    weights = np.random.default_rng(1).dirichlet(np.ones(3), size=5)
    rows, columns = ("r0", "<r1>", "r2", "r$3$", "猫"), ("c0", "c&1", "c2")
    save_picture(tmp_path / "a.svg", rows, columns, weights)
    root = ET.parse(tmp_path / "a.svg").getroot()
    texts = ["".join(one.itertext()).strip() for one in root.iter("{http://www.w3.org/2000/svg}text")]
    titles = ("key", "query", "Attention, last layer,", "mean of its heads", "weight", "0.0", "0.5", "1.0")
    assert sorted(texts) == sorted(rows + columns + titles)
    (cells,) = (one for one in root.iter() if one.get("id", "").startswith("QuadMesh"))
    fills = [re.search(r"fill: #(\w{6})", one.get("style", "")) for one in cells if one.tag.endswith("path")]
    shown = [[int(fill[1][i : i + 2], 16) for i in (0, 2, 4)] for fill in fills if fill]
    dark = [int(theme_colour("heat")[i : i + 2], 16) for i in (1, 3, 5)]
    expected = [[255 - w * (255 - x) for x in dark] for w in weights.flat]
    np.testing.assert_allclose(shown, expected, atol=2)
    first = (tmp_path / "a.svg").read_bytes()
    save_picture(tmp_path / "a.svg", rows, columns, weights)
    assert (tmp_path / "a.svg").read_bytes() == first and b"date" not in first


def test_a_png_shows_the_weights(tmp_path: Path) -> None:
    """Pixels are dark where the weight is."""
    weights = np.zeros((3, 3), np.float32)
    weights[0, 2] = weights[1, 0] = weights[2, 1] = 1
    save_picture(tmp_path / "a.png", [""] * 3, [""] * 3, weights)
    pixels = imread(tmp_path / "a.png")[..., :3]
    blue = (pixels[..., 2] - pixels[..., 0]) > 0.2
    ys, xs = np.nonzero(blue)
    scale = np.flatnonzero(np.diff(np.unique(xs)) > 5)[-1]  # beyond the last gap
    ys, xs = ys[xs <= np.unique(xs)[scale]], xs[xs <= np.unique(xs)[scale]]
    thirds = (np.stack([ys - ys.min(), xs - xs.min()]) * 3 // (np.array([[np.ptp(ys)], [np.ptp(xs)]]) + 1)).T
    found, counts = np.unique(thirds, axis=0, return_counts=True)
    dark = {tuple(cell) for cell, n in zip(found.tolist(), counts, strict=True) if n > 0.5 * counts.max()}
    assert dark == {(0, 2), (1, 0), (2, 1)}


def test_other_formats_and_no_attention_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"use \.svg or \.png"):
        save_picture(tmp_path / "a.gif", ["a"], ["b"], np.ones((1, 1)))
    with pytest.raises(UserError, match="no attention"):
        save_picture(tmp_path / "a.svg", [], [], np.zeros((0, 0)))
    assert not list(tmp_path.glob("a.*"))
