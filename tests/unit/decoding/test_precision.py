"""`precision="auto"`: the record that it reads, and who writes it."""

from __future__ import annotations

from typing import Any

import pytest

from transduce.decoding import loading, native_library, precision
from transduce.decoding.loading import EngineChoice
from transduce.decoding.native_model import PRECISIONS
from transduce.decoding.precision import RECORD, auto_precision, model_digest
from transduce.decoding.translator import Translator
from transduce.errors import DataError, RunFolderError, SettingsError
from transduce.evaluation.precisions import check_measurable, measure_precisions
from transduce.runs.folder import RunFolder

NATIVE = pytest.mark.skipif(isinstance(native_library.load_library(), str), reason="the native library is not built")


@pytest.fixture
def folder(make_run: Any) -> RunFolder:
    return RunFolder.open(make_run())


def record(folder: RunFolder, float32: float, fast: float, int8: float, **more: Any) -> dict[str, Any]:
    bleu = {"float32": float32, "float32-fast": fast, "int8": int8}
    return {"model": model_digest(folder), "sentences": 200, "bleu": bleu, **more}


@pytest.fixture(autouse=True)
def instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "instruction_set", lambda: "amx")


@pytest.mark.parametrize(
    ("bleu", "best"),
    [
        ((30.0, 30.0, 29.9), "int8"),
        ((30.0, 30.0, 31.0), "int8"),
        ((30.0, 30.0, 29.89), "float32-fast"),
        ((30.0, 29.0, 29.0), "float32"),
        ((0.0, 0.0, 0.0), "int8"),
    ],
)
def test_auto_is_the_fastest_precision_within_the_loss(
    bleu: tuple[float, float, float], best: str, folder: RunFolder
) -> None:
    folder.write_record(RECORD, record(folder, *bleu))
    found, because = auto_precision(folder)
    assert found == best and bool(because) == (best == "int8")
    if because:
        assert f"{bleu[2]:.2f} BLEU on 200 validation sentences, {bleu[0]:.2f} in float32" in because


@pytest.mark.parametrize("name", ["", "portable", "avx2", "avx512"])
def test_auto_is_not_int8_where_that_is_no_faster(
    name: str, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "instruction_set", lambda: name)
    folder.write_record(RECORD, record(folder, 30.0, 30.0, 30.0))
    assert auto_precision(folder) == ("float32-fast", "")


def test_without_a_measurement_auto_gives_the_tokens_of_float32(folder: RunFolder) -> None:
    assert auto_precision(folder) == ("float32-fast", "")
    folder.write_record(RECORD, record(folder, 1, 1, 1, model="other weights"))
    assert auto_precision(folder) == ("float32-fast", "")


@pytest.mark.parametrize("content", [[], 1, {"model": 1}, {"bleu": 1}, "x", {"bleu": {"float32": "x"}}])
def test_a_damaged_record_names_the_file(content: Any, folder: RunFolder) -> None:
    if isinstance(content, dict):
        content = {"model": model_digest(folder), "sentences": 1, **content}
    folder.write_record(RECORD, content or [0])
    if content == {"model": 1, "sentences": 1}:
        assert auto_precision(folder)[0] == "float32-fast"
        return
    with pytest.raises(RunFolderError, match=f"{folder.path / RECORD} is damaged.*--measure-precisions"):
        auto_precision(folder)
    (folder.path / RECORD).write_text("{}")
    with pytest.raises(RunFolderError, match=str(folder.path / RECORD)):
        Translator.load(folder.path, device="cpu", precision="auto")


@NATIVE
def test_measured_scores_are_stored_and_used(folder: RunFolder, texts: list[str]) -> None:
    expected = [one.text for one in Translator.load(folder.path, device="cpu").translate(texts[:20])]
    bleu = measure_precisions(folder, list(zip(texts[:20], expected, strict=True)))
    assert not isinstance(bleu, str) and bleu["float32"] == max(bleu.values()) and set(bleu) == {*PRECISIONS}
    found = Translator.load(folder.path, device="cpu", precision="auto")
    assert found.choice.precision == auto_precision(RunFolder.open(folder.path))[0]
    folder.write_record(RECORD, record(folder, 10, 10, 10))
    found = Translator.load(folder.path, device="cpu", precision="auto")
    assert found.choice.precision == "int8" and found.choice.notes()[0].startswith("precision int8: 10.00 BLEU")
    int8 = Translator.load(folder.path, device="cpu", precision="int8")
    assert found.translate(texts[:5]) == int8.translate(texts[:5]) and not int8.choice.precision_because


def test_without_the_library_auto_is_float32_and_nothing_is_measured(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_record(RECORD, record(folder, 10, 10, 10))
    monkeypatch.setattr(loading, "native_engine", lambda *_, **__: "not built")
    found = Translator.load(folder.path, device="cpu", precision="auto")
    assert found.choice == EngineChoice("float32", slow_because="not built")
    assert found.choice.notes() == ["decoding with PyTorch, which is slower: not built"]
    assert measure_precisions(folder, [("a", "b")]) == "not built"
    with pytest.raises(SettingsError, match="needs the native library: not built"):
        check_measurable(folder, [("a", "b")])


@NATIVE
def test_blank_text_is_refused(folder: RunFolder) -> None:
    check_measurable(folder, [("a", " "), ("a", "b")])
    with pytest.raises(DataError, match="nothing to measure"):
        check_measurable(folder, [("a", " "), ("", "b")])
