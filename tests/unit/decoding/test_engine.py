"""The engine gets options unchanged and equal lines once, and makes its threads once."""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import marians
from transduce.config.decoding import DecodingOptions
from transduce.decoding import torch_engine
from transduce.decoding.engine import DecodingInput, Engine, Hypothesis
from transduce.decoding.torch_engine import TorchEngine
from transduce.decoding.translator import Translator
from transduce.errors import SettingsError
from transduce.kernels.library import load_library


@contextmanager
def pytorch_threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Recorder:
    """An engine that copies its sources and records its calls."""

    device = "cpu"

    def __init__(self) -> None:
        self.asked: list[tuple[list[DecodingInput], DecodingOptions]] = []

    def translate(
        self, sources: Sequence[DecodingInput], options: DecodingOptions, **_: object
    ) -> list[list[Hypothesis]]:
        self.asked.append((list(sources), options))
        return [[Hypothesis(tuple(source.ids), -1.0, -1.0)] for source in sources]

    def score(self, *_: object, **__: object) -> list[list[float]]:
        raise AssertionError

    attention = open_batcher = score_rows = pytorch_model = score


def test_the_pytorch_engine_implements_the_protocol(translator: Translator) -> None:
    assert isinstance(translator.engine, Engine) and isinstance(Recorder(), Engine)


def test_options_reach_the_engine_unchanged_and_equal_lines_once(translator: Translator, texts: list[str]) -> None:
    recorder = Recorder()
    other = Translator(recorder, translator.tokenizers)
    lines = [texts[i] for i in (0, 1, 0, 2, 0, 1)]
    options = DecodingOptions(beam=7, length_penalty=0.5)
    found = other.translate(lines, options)
    ((sources, seen),) = recorder.asked
    assert seen == options and seen.model_fields_set == {"beam", "length_penalty"}
    assert [source.key for source in sources] == [(0,), (1,), (3,)]
    assert [t.ids for t in found] == [tuple(other.tokenizers.src.encode(line)) for line in lines]
    other.translate(lines, DecodingOptions(sample=True))
    assert [source.key for source in recorder.asked[1][0]] == [(i,) for i in range(6)]


def test_equal_lines_get_the_same_translation_but_different_samples(tmp_path: Path) -> None:
    translator = Translator.load(marians.make_run(tmp_path / "run"))
    lines = [marians.LINES[i] for i in (0, 5, 0, 0, 7, 5)]
    options = DecodingOptions(beam=2, n_best=2)
    for line, translation in zip(lines, translator.translate(lines, options), strict=True):
        assert translation == translator.translate([line], options)[0]
    drawn = [one.text for one in translator.translate([lines[0]] * 8, DecodingOptions(sample=True))]
    assert len(set(drawn)) > 1


def test_concurrent_calls_agree_and_keep_the_number_of_threads(
    translator: Translator, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads started later have as many PyTorch threads as before."""
    engine = TorchEngine(translator.model)
    fresh = Translator(engine, translator.tokenizers, settings=translator.settings)
    options = DecodingOptions(beam=2, batch_tokens=60, max_length=6)
    with pytorch_threads(2):
        expected = fresh.translate(texts[:12], options)
        alone = fresh.translate(texts[:12], options.model_copy(update={"batch_tokens": 1}))
        assert [t.ids for t in expected] == [t.ids for t in alone]
        workers = engine._workers
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: fresh.translate(texts[:12], options), range(8)))
        assert all(translations == expected for translations in found)
        assert engine._workers is workers is not None, "the threads are made once"
        counts = [torch.get_num_threads()]
        later = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert counts == [2, 2]
        monkeypatch.setattr(torch_engine, "beam_search", None)
        with pytest.raises(TypeError):  # in a thread
            fresh.translate(texts[:12], options)


def test_translate_never_sets_the_number_of_threads(
    translator: Translator, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = DecodingOptions(beam=2, batch_tokens=60, max_length=5)
    with pytorch_threads(2):
        fresh = Translator(TorchEngine(translator.model), translator.tokenizers, settings=translator.settings)
        fresh.translate(texts[:20], options)
        monkeypatch.setattr(torch, "set_num_threads", None)
        fresh.translate(texts[:20], options)
        monkeypatch.undo()


@pytest.mark.parametrize(
    "wrong",
    [
        {"beam": 0},
        {"beam": 513},
        {"n_best": 0},
        {"beam": 2, "n_best": 3},
        {"max_length": 0},
        {"length_penalty": -1.0},
        {"length_penalty": float("nan")},
        {"batch_tokens": 0},
        {"seed": -1},
        {"beam": 2, "sample": True},
        {"temperature": 0.5},
        {"temperature": -1.0, "sample": True},
        {"temperature": math.nan, "sample": True},
        {"top_p": 1.5, "sample": True},
        {"top_k": -1, "sample": True},
    ],
    ids=str,
)
def test_options_out_of_range_or_without_effect_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        DecodingOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="there is no C++ compiler")
def test_the_native_library_loads_where_it_can_be_compiled() -> None:
    """The tests of the library are skipped where it does not load."""
    assert not isinstance(found := load_library(), str), found
