"""The loss and the gain of each precision, measured and reported."""

from pathlib import Path
from typing import Any

import pytest

from native_engines import needs_library
from transduce.decoding import open_run
from transduce.decoding.native_model import PRECISIONS
from transduce.decoding.translator import Translator
from transduce.evaluation.evaluate import TranslationEvaluation, evaluate_translations, measure_precisions
from transduce.evaluation.metrics import format_precisions
from transduce.logging import Log
from transduce.runs.folder import RunFolder

MEASURED = {
    "float32": {"bleu": 30.11, "sentences_per_second": 500.0},
    "int8": {"bleu": 30.06, "sentences_per_second": 950.0},
}


@pytest.fixture
def folder(make_run: Any) -> RunFolder:
    return RunFolder.open(make_run())


def test_each_precision_is_compared_with_float32() -> None:
    (line,) = format_precisions(MEASURED)
    assert all(part in line for part in ("int8", "-0.05", "1.9 times as fast"))


@needs_library
@pytest.mark.parametrize("instructions", ["amx", "avx512_vnni", "avx2"])
def test_each_precision_that_the_cpu_has_is_measured(
    folder: RunFolder, texts: list[str], instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transduce.evaluation.evaluate.instruction_set", lambda: instructions)
    expected = [one.text for one in Translator.load(folder.path, device="cpu").translate(texts[:20])]
    found = measure_precisions(folder, list(zip(texts[:20], expected, strict=True)), Log(quiet=True))
    assert not isinstance(found, str)
    assert list(found) == [name for name in PRECISIONS if instructions == "amx" or name != "float32-fast"]
    assert found["float32"]["bleu"] == max(values["bleu"] for values in found.values())
    assert all(values["sentences_per_second"] > 0 for values in found.values())


def test_pairs_with_one_blank_side_are_noted(folder: RunFolder, tmp_path: Path) -> None:
    for name, lines in (("src", "a man\n \n\na dog\n"), ("ref", "ein Mann\nein Hund\n\n\n")):
        (tmp_path / name).write_text(lines)
    options = TranslationEvaluation(src=tmp_path / "src", ref=tmp_path / "ref")
    notes = evaluate_translations(folder.path, options, device="cpu").notes
    assert any(note.startswith("2 of 4 pairs have a blank source or reference") for note in notes)


def test_without_the_library_nothing_is_measured(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_run, "_native_engine", lambda *_, **__: "not built")
    found = Translator.load(folder.path, device="cpu", precision="int8")
    assert found.choice.precision == "float32"
    assert found.choice.notes() == ["decoding with PyTorch, which is slower: not built"]
    assert measure_precisions(folder, [("a", "b")], Log(quiet=True)) == "not built"
