"""Forced prefixes: what every output of a sentence starts with. test_search.py compares them with a search on lists."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from native_engines import engine_for, needs_library
from oracle.stand_in import BOS, EOS, PAD, untrained
from transduce.cli.app import app
from transduce.config.decoding import DecodingOptions
from transduce.config.settings import Settings
from transduce.data.examples import Example
from transduce.decoding.engine import DecodingInput, Engine
from transduce.decoding.torch_engine import TorchEngine
from transduce.decoding.translator import Translator
from transduce.errors import DataError, SettingsError

SETTINGS = Settings.from_mapping(
    {"model": {"d_model": 32, "d_ff": 48, "n_heads": 2, "n_encoder_layers": 1, "n_decoder_layers": 2}}
)
MODEL = untrained(SETTINGS, n_src=90, n_tgt=90)


def sources(n: int) -> list[DecodingInput]:
    pick = random.Random(1)
    return [
        DecodingInput((i,), [pick.randrange(4, 90) for _ in range(9)], 12, tuple(pick.choices(range(4, 90), k=i % 13)))
        for i in range(n)
    ]


@needs_library
@pytest.mark.parametrize("beam", [1, 2, 5])
def test_both_engines_force_the_same_and_count_the_prefix_in_the_score(beam: int) -> None:
    native, pytorch = engine_for(MODEL, SETTINGS, n_threads=2), TorchEngine(MODEL)
    asked, options = sources(30), DecodingOptions(beam=beam, n_best=beam)
    ours, theirs = native.translate(asked, options), pytorch.translate(asked, options)
    for source, one, other in zip(asked, ours, theirs, strict=True):
        assert [h.ids for h in one] == [h.ids for h in other]
        assert [h.log_prob for h in one] == pytest.approx([h.log_prob for h in other], abs=1e-4)
        assert all(h.ids[: len(source.prefix)] == source.prefix for h in one)
        assert native.translate([source], options) == [one], "the same bits alone"
    best = [(source, one[0]) for source, one in zip(asked, ours, strict=True)]
    scores = pytorch.score([Example(list(source.ids), list(h.ids)) for source, h in best])
    for (_, h), known in zip(best, scores, strict=True):
        assert h.log_prob == pytest.approx(sum(known[: len(h.ids) + h.finished]), abs=1e-3)
    if beam == 1:
        fast = native.translate(asked, DecodingOptions(beam=1, scores=False))
        assert [h[0].ids for h in fast] == [h[0].ids for h in ours]


@pytest.mark.parametrize(
    "make", [TorchEngine, pytest.param(lambda model: engine_for(model, SETTINGS), marks=needs_library)]
)
def test_samples_start_with_the_prefix(make: Callable[..., Engine]) -> None:
    found = make(MODEL).translate(sources(13), DecodingOptions(sample=True, temperature=2.0, n_best=3))
    for source, drawn in zip(sources(13), found, strict=True):
        assert all(h.ids[: len(source.prefix)] == source.prefix for h in drawn)
    assert len({h.ids for h in found[3]}) == 3, "and differ after it"


def test_a_prefix_that_cannot_be_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"prefix of 3 tokens.*limit of 2"):
        DecodingInput((0,), [5], 2, (5, 6, 7))
    for special in (PAD, BOS, EOS):
        with pytest.raises(SettingsError, match="prefix"):
            DecodingInput((0,), [5], 9, (5, special))


def test_translations_start_with_prefixes(translator: Translator, texts: list[str]) -> None:
    start = "ein Mann"
    ids = tuple(translator.tokenizers.tgt.encode(start))
    first, second, third, empty = translator.translate([*[texts[0]] * 3, ""], prefixes=[start, "", start, start])
    assert first == third and first.candidates[0].ids[: len(ids)] == ids
    assert [second] == translator.translate([texts[0]]) and empty.text == ""
    with pytest.raises(DataError, match="2 texts but 1 prefixes"):
        translator.translate(texts[:2], prefixes=[start])
    with pytest.raises(DataError, match=r"line 2: a prefix of .* tokens; its output may have 3"):
        translator.translate(texts[:2], DecodingOptions(max_length=3), prefixes=["", start * 9])


def test_prefixes_from_a_file(run: Path, texts: list[str], tmp_path: Path) -> None:
    src, prefix, out = tmp_path / "in.en", tmp_path / "starts.de", tmp_path / "out.de"
    src.write_text("\n".join(texts[:3]) + "\n")
    command = ["translate", str(run), str(src), "--prefix", str(prefix), "--device", "cpu", "-o", str(out)]
    prefix.write_text("ein\n\nzwei\n")
    assert CliRunner().invoke(app, command).exit_code == 0
    lines = out.read_text().splitlines()
    assert lines[0].startswith("ein") and lines[2].startswith("zwei")
    for content, message in (("ein\n", "line 2: there is no prefix"), ("a\n" * 4, "more lines than the text")):
        prefix.write_text(content)
        error = CliRunner().invoke(app, command).exception
        assert isinstance(error, DataError) and message in str(error)
    error = CliRunner().invoke(app, [*command[:-2], "--output-dir", str(tmp_path / "out")]).exception
    assert isinstance(error, SettingsError) and "--prefix" in str(error)
