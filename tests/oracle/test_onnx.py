"""Exported ONNX graphs in onnxruntime compared with ours: random options, cached steps, whole translations.

Tracing takes seconds per model. More random configurations: TRANSDUCE_ONNX_MODELS=200.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch

import marians
import text_runs
from marians import LINES
from oracle.cases import SINGLE, combination
from transduce.config.decoding import DecodingOptions
from transduce.convert import parity
from transduce.convert.exporting import export_run, open_outgoing
from transduce.decoding.generator import Generator
from transduce.decoding.translator import Translator
from transduce.errors import TransduceError
from transduce.runs.folder import RunFolder

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
from onnx_user import first_state, translate  # noqa: E402
from transduce.convert import onnx_graphs  # noqa: E402

BOUND = 2e-5
N_MODELS = int(os.environ.get("TRANSDUCE_ONNX_MODELS", "1"))


def export(run: Path, **options: Any) -> tuple[Path, list[str]]:
    """Export with type checks off: while the exporter traces, sizes are symbols and not of type int."""
    out = run.parent / "onnx"
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        return out, list(export_run(run, "onnx", out, **options))
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By the kind of tie and by whether weights go into a second file: a run, its export and the report."""

    @cache
    def make(tie: str, large: bool) -> tuple[Path, Path, list[str]]:
        with pytest.MonkeyPatch.context() as patch:
            if large:
                patch.setattr(onnx_graphs, "MAX_INLINE_BYTES", 1000)
            run = marians.make_run(tmp_path_factory.mktemp("kept") / "run", d_ff=500, tie=tie, joint=False)
            return run, *export(run)

    return make


def do_not_trace(monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    """Write the graphs of an export in place of new ones, as tracing takes many seconds."""

    def save(graph: onnx_graphs.Graph, path: Path) -> None:
        for file in kept.glob(f"{path.name}*"):
            shutil.copy(file, path.parent)

    monkeypatch.setattr(onnx_graphs.Graph, "save", save)


def open_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """transduce.json, and the graphs that it names."""
    how = json.loads((folder / "transduce.json").read_text())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    names = [name for name in ("encoder", "decoder") if name in how]
    graphs = {name: onnxruntime.InferenceSession(folder / how[name]["file"], options) for name in names}
    for name, graph in graphs.items():
        for names, found in ((how[name]["inputs"], graph.get_inputs()), (how[name]["outputs"], graph.get_outputs())):
            assert names == [one.name for one in found]
    return how, graphs


def difference(found: np.ndarray, expected: torch.Tensor) -> float:
    assert found.shape == tuple(expected.shape)
    return float(np.abs(found - expected.numpy()).max())


def translator_difference(run: Path, out: Path) -> float:
    """Padded sources, the beginning of the target in parts of several lengths."""
    how, graphs = open_folder(out)
    ours = Translator.load(run)
    model: Any = ours.model
    most = min(ours.tokenizers.n_src, ours.tokenizers.n_tgt)
    generator = torch.Generator().manual_seed(3)
    src = torch.randint(4, most, (5, 9), generator=generator)
    for row, length in enumerate((1, 9, 4, 7, 2)):
        src[row, length:] = 0
    ids = torch.randint(1, most, (5, 11), generator=generator)
    with torch.no_grad():
        expected = model.logits(model(src, ids))
    mask = (src != 0).numpy()
    cross = graphs["encoder"].run(None, {"ids": src.numpy(), "mask": mask})
    fixed = {"mask": mask, **dict(zip(how["encoder"]["outputs"], cross, strict=True))}
    return stepped_difference(how, graphs["decoder"], ids, expected, fixed)


def stepped_difference(
    how: dict[str, Any], decoder: Any, ids: torch.Tensor, expected: torch.Tensor, fixed: dict[str, Any]
) -> float:
    state, at, largest = first_state(how, n_rows=len(ids)), 0, 0.0
    for n in (1, 1, 4, 2, 1, 1, 1):
        logits, *values = decoder.run(None, {"ids": ids[:, at : at + n].numpy(), **fixed, **state})
        state = dict(zip(state, values, strict=True))
        largest, at = max(largest, difference(logits, expected[:, at : at + n])), at + n
    assert at == ids.shape[1]
    return largest


OPTIONS = {
    **{f"random {seed}": combination(seed) | {"decoder_self": "attention"} for seed in range(N_MODELS)},
    "modern": {**SINGLE["modern"], "n_kv_heads": 1},
    "positions beyond the table": {**SINGLE["sines, then cosines, odd"], "max_positions": 8},
    "learned, conv 3": SINGLE["learned"] | SINGLE["conv 3"],
    "alibi, local": {**SINGLE["alibi"], **SINGLE["local"], "d_key": 6},
    "t5, fixed": SINGLE["t5"] | SINGLE["fixed"],
    "shaw": SINGLE["shaw"],
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_translators(tmp_path: Path, options: dict[str, Any]) -> None:
    """Logits, and text to text by onnxruntime and sentencepiece: what `transduce translate --beam 1` gives."""
    tie = options.get("tie", "two_way")
    options = {"n_encoder_layers": 1, **options, "tie": tie}
    run = marians.make_run(tmp_path / "run", joint=tie == "three_way", **options)
    out, lines = export(run)
    assert "checked: outputs of onnxruntime" in lines[1]
    assert translator_difference(run, out) <= BOUND, options
    texts = [*LINES[::24], "ein Buch , two books", "猫"]
    expected = Translator.load(run).translate(texts, DecodingOptions(beam=1))
    assert len({found.text for found in expected}) > 1, "the model does not look at its source"
    assert translate(out, texts) == [found.text for found in expected]
    assert b"onnx_graphs.py" not in (out / "encoder.onnx").read_bytes(), "a stack trace"


def test_export_that_differs_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Any) -> None:
    run, out, _ = kept("none", True)
    do_not_trace(monkeypatch, out)
    different, state = shutil.copytree(run, tmp_path / "run"), marians.state_of(run)
    state["src_embedding.table.weight"][10:] = state["src_embedding.table.weight"][9]
    RunFolder.open(different).save_model(state)
    with pytest.raises(TransduceError, match="not the same"):
        export(different)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("seed", range(max(1, N_MODELS // 3)))
def test_language_models_of_random_configurations(tmp_path: Path, seed: int) -> None:
    import sentencepiece

    run = text_runs.make_run(tmp_path / "run", **{**combination(100 + seed), **text_runs.GPT})
    out, _ = export(run)
    how, graphs = open_folder(out)
    generator = Generator.load(run)
    ids = torch.randint(1, 80, (3, 11), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = generator.model.logits(generator.model(ids))
    assert stepped_difference(how, graphs["decoder"], ids, expected, {}) <= BOUND
    cut = sentencepiece.SentencePieceProcessor(model_file=str(out / how["tokenizer"]["file"]))
    greedy = DecodingOptions(max_length=12, sample=True, temperature=0)
    (text,) = generator.generate(["a man\nreads"], greedy)
    new, found, state = how["begin"] + cut.encode("a man\nreads"), list[int](), first_state(how, 1)
    while len(found) < 12 and how["special"]["end"] not in found:
        logits, *values = graphs["decoder"].run(None, {"ids": np.array([new]), **state})
        state = dict(zip(state, values, strict=True))
        logits[0, -1, how["never_written"]] = -np.inf
        new = [int(logits[0, -1].argmax())]
        found += new
    assert tuple(found) == text.ids


@pytest.mark.parametrize("kind", ["bert", "bert-classifier", "bert-encoder"])
@pytest.mark.parametrize("seed", range(max(1, N_MODELS // 5)))
def test_encoders_of_random_configurations(tmp_path: Path, kind: str, seed: int) -> None:
    draw = random.Random(seed)
    more = {
        "n_segments": draw.choice([0, 1, 2]),
        "next_sentence": kind == "bert" and draw.random() < 0.5,
        "pooling": "first" if kind == "bert" else draw.choice(["first", "mean", "max", "conv"]),
        "n_encoder_layers": draw.choice([1, 2]),
    }
    run = text_runs.make_run(tmp_path / "run", **{**combination(200 + seed), **more, "kind": kind})
    out, lines = export(run)
    assert "checked" in lines[1]
    how, graphs = open_folder(out)
    ids = torch.tensor([[2, 7, 9, 3, 8, 3], [2, 11, 3, 0, 0, 0]])
    segments = torch.tensor([[0, 0, 0, 0, 1, 1], [0] * 6]) % max(1, more["n_segments"])
    given = {"ids": ids.numpy(), "mask": (ids != 0).numpy(), "segments": segments.numpy()}
    outputs = graphs["encoder"].run(None, {name: given[name] for name in how["encoder"]["inputs"]})
    with torch.no_grad():
        expected = parity.head_outputs(open_outgoing(run).model, ids, segments)
    assert list(expected) == how["encoder"]["outputs"]
    for name, found in zip(expected, outputs, strict=True):
        real = ids != 0 if found.ndim == 3 else torch.tensor([True, True])
        assert difference(found[real.numpy()], expected[name][real]) <= BOUND
    assert how.get("labels") == (text_runs.LABELS if kind == "bert-classifier" else None)


def test_large_weights_go_into_a_second_file(kept: Any) -> None:
    run, out, lines = kept("none", True)
    assert (out / "encoder.onnx.data").stat().st_size > 2 * 4 * 16 * 500 * 2 and "checked" in lines[1]
    assert (out / "encoder.onnx").stat().st_size < (out / "encoder.onnx.data").stat().st_size
    assert translator_difference(run, out) <= BOUND


@pytest.mark.parametrize(("tie", "large"), [("none", True), ("two_way", False)])
def test_int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Any, tie: str, large: bool) -> None:
    """No float32 matrices are left; the output matrix, tied or not, is multiplied in int8."""
    import onnx

    run, float32, _ = kept(tie, large)
    do_not_trace(monkeypatch, float32)
    out, lines = export(shutil.copytree(run, tmp_path / "run"), quantization="int8")
    assert "checked" in lines[1] and "int8 moves outputs by" in lines[2] and translate(out, LINES[:1])[0]
    graphs = [name + suffix for name in ("encoder.onnx", "decoder.onnx") for suffix in ("", ".data")[: 1 + large]]
    assert {path.name for path in out.iterdir()} == {*graphs, "source.spm", "target.spm", "transduce.json"}
    graph = onnx.load(out / "decoder.onnx", load_external_data=False).graph
    places = {one.external_data[0].value for one in graph.initializer if one.external_data}
    assert places == ({"decoder.onnx.data"} if large else set())
    whole = [one.name for one in graph.initializer if one.data_type == onnx.TensorProto.FLOAT and len(one.dims) == 2]
    assert whole == []
    n_products = [node.op_type for node in graph.node].count("MatMulInteger")
    assert n_products == 7  # query-key-value, 2 outputs, query, expand, contract; the output matrix, tied or not
