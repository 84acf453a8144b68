"""The public Python API: typed for checkers and editors, and with the calls that people try first."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch

import transduce
from system.commands import SMALL
from transduce import DecodingOptions, Settings, Translator, inspect, train, translate_to_folder
from transduce.config.decoding import DecodingKeywords
from transduce.config.recipe import apply_overrides
from transduce.demo.corpus import demo_pairs
from transduce.errors import SettingsError
from transduce.logging import Log

SRC = Path(transduce.__file__).parents[1]
TYPED = """
from transduce import Settings, Translator, train
translator = Translator.load("runs/x", trainable=True)
reveal_type(translator)
reveal_type(translator.translate("A dog.").text)
reveal_type(translator.translate(["A dog."])[0].text)
reveal_type(train(src="a", tgt="b", run="c"))
translator.translate("A dog.", beam=5, n_best=3, prefixes=["Ein"])
translator.translate("A dog.", beam="5")
translator.translate("A dog.", num_beams=5)
"""


def settings() -> Settings:
    values: dict[str, object] = {}
    apply_overrides(values, [*SMALL, "training.max_updates=2"])
    return Settings.from_mapping(values)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained on pairs in memory."""
    pairs = [(pair.src, pair.tgt) for pair in demo_pairs("train", 60, seed=1)]
    return train(settings(), tmp_path_factory.mktemp("api") / "run", pairs=pairs, log=Log(quiet=True))


@pytest.mark.slow
def test_type_checkers_know_the_public_names(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(TYPED)
    environment = {**os.environ, "MYPYPATH": str(SRC)}
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path), "user.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    revealed = [line.split('"')[1] for line in done.stdout.splitlines() if "Revealed type" in line]
    assert [name.rpartition(".")[2] for name in revealed] == ["Translator", "str", "str", "Path"], done.stdout
    wrong = {int(line.split(":")[1]) for line in done.stdout.splitlines() if "error: " in line}
    assert wrong == {9, 10}, done.stdout


def test_every_lazy_name_is_typed_and_listed() -> None:
    tree = ast.parse(Path(transduce.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert typed == transduce._LAZY
    assert set(transduce.__all__) <= set(dir(transduce))


def test_one_text_has_one_translation(run: Path) -> None:
    translator = Translator.load(run)
    one, (same,) = translator.translate("The dog sleeps."), translator.translate(["The dog sleeps."])
    assert one == same
    assert translator.translate("The dog sleeps.", prefixes=["Der"]).text.startswith("Der")
    with pytest.raises(TypeError, match="list of texts"):
        translator.translate_lines("The dog sleeps.")


def test_options_are_keywords_which_replace_those_of_an_object(run: Path, tmp_path: Path) -> None:
    assert get_type_hints(DecodingKeywords) == {
        name: get_type_hints(DecodingOptions)[name] for name in DecodingOptions.model_fields
    }
    translator, texts = Translator.load(run), ["The dog sleeps.", "A cat."]
    options = DecodingOptions(beam=3, n_best=3, length_penalty=0.5)
    expected = translator.translate(texts, options)
    assert expected != translator.translate(texts)
    assert translator.translate(texts, beam=3, n_best=3, length_penalty=0.5) == expected
    assert translator.translate(texts, DecodingOptions(beam=3, n_best=2), n_best=3, length_penalty=0.5) == expected
    assert translator.translate(texts[0], beam=3, n_best=3, length_penalty=0.5) == expected[0]
    assert list(translator.translate_lines(iter(texts), options.with_values(n_best=1), n_best=3)) == expected
    file = tmp_path / "a"
    file.write_text("".join(f"{text}\n" for text in texts))
    (output,) = translate_to_folder(run, [file], tmp_path / "out", beam=1, max_length=2, log=Log(quiet=True))
    assert output.read_text().splitlines() == [one.text for one in translator.translate(texts, beam=1, max_length=2)]


def test_keywords_have_the_errors_of_the_options(run: Path) -> None:
    translator = Translator.load(run)
    with pytest.raises(SettingsError, match="unknown key 'num_beams'; did you mean 'beam'"):
        translator.translate("A dog.", num_beams=4)  # type: ignore[call-overload]
    with pytest.raises(SettingsError, match="unknown key 'lenght_penalty'; did you mean 'length_penalty'"):
        translator.translate("A dog.", lenght_penalty=1.0)  # type: ignore[call-overload]
    with pytest.raises(SettingsError, match="n_best = 3: more than beam = 2"):
        translator.translate("A dog.", DecodingOptions(beam=2), n_best=3)
    with pytest.raises(SettingsError, match="temperature: no effect on a search"):
        translator.translate("A dog.", temperature=0.5)


@pytest.mark.parametrize(("theirs", "ours"), [("num_beams", "beam"), ("num_return_sequences", "n_best")])
def test_names_of_other_libraries_suggest_ours(theirs: str, ours: str) -> None:
    with pytest.raises(SettingsError, match=f"unknown key '{theirs}'; did you mean '{ours}'"):
        DecodingOptions(**{theirs: 4})  # type: ignore[arg-type]


def test_training_takes_files_or_pairs(run: Path, tmp_path: Path) -> None:
    for name, side in (("a.en", 0), ("a.de", 1)):
        lines = [(pair.src, pair.tgt)[side] for pair in demo_pairs("train", 60, seed=1)]
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    path = train(settings(), tmp_path / "run", src=tmp_path / "a.en", tgt=tmp_path / "a.de", log=Log(quiet=True))
    assert (path / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    with pytest.raises(SettingsError, match="run='runs/NAME'"):
        train(src="a", tgt="b")
    with pytest.raises(SettingsError, match="give src and tgt, or pairs"):
        train(src="a", run=tmp_path / "x")
    with pytest.raises(SettingsError, match="no training text"):
        train(run=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_trainable_model_gets_gradients_and_translates_the_same(run: Path) -> None:
    frozen, translator = Translator.load(run, device="cpu"), Translator.load(run, device="cpu", trainable=True)
    src, tgt = torch.tensor([[5, 6, 7]]), torch.tensor([[1, 5, 6]])
    translator.model(src, tgt).sum().backward()
    assert all(parameter.grad is not None for parameter in translator.model.parameters())
    assert not any(parameter.requires_grad for parameter in frozen.model.parameters())
    options = DecodingOptions(beam=1)
    texts = [found.translate(["The dog sleeps."], options)[0].text for found in (frozen, translator)]
    assert texts[0] == texts[1]


def test_values_of_an_inspection_are_indexable(run: Path) -> None:
    found = inspect(Translator.load(run), "The dog sleeps.")
    weights = found["decoder.blocks.0.cross_attention.weights"]
    assert len(weights) == weights.shape[0]
    assert np.array_equal(weights[0, :, -1], np.asarray(weights)[0, :, -1])
    assert weights[0].sum() == pytest.approx(weights.shape[1], rel=1e-3)
