"""The recipes of a comparison: what they share, and what they may not differ in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from transduce.comparison.compare import read_recipes
from transduce.config.settings import Settings
from transduce.errors import SettingsError
from transduce.tasks.resolve import check

RECIPES = Path(__file__).parents[3] / "recipes" / "compare"
BASE: dict[str, Any] = {
    "data": {"train": [{"src": "a.en", "tgt": "a.de"}], "max_length": 100},
    "tokenizer": {"vocab_size": 300, "sampling": 0.1},
    "training": {"batch_tokens": 512, "max_epochs": 3, "lr": 0.01, "seed": 5},
    "decoding": {"beam": 2},
}


def shared(other: dict[str, Any], **limits: float) -> dict[str, Settings]:
    return read_recipes({"base": BASE, "other": other}, limits=limits)


def test_other_recipes_take_the_shared_settings_of_the_first_and_keep_their_own() -> None:
    found = shared({"model": {"n_heads": 2}, "training": {"lr": 0.02, "batch_tokens": 512}})["other"]
    assert found.data == shared({})["base"].data and found.data.max_length == 100
    assert (found.tokenizer.vocab_size, found.decoding.beam, found.name) == (300, 2, "other")
    training = found.training
    assert (training.batch_tokens, training.max_epochs, training.seed, training.lr) == (512, 3, 5, 0.02)
    assert found.model.n_heads == 2 and "max_updates" not in training.model_fields_set


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        ({"data": {"max_length": 99}}, ["other: data.max_length is 99, and 100 in base", "leave it out"]),
        ({"data": {"train": [{"src": "b.en", "tgt": "a.de"}]}}, ["data.train.0.src is"]),
        ({"tokenizer": {"kind": "bpe"}}, ["tokenizer.kind is bpe, and unigram in base"]),
        ({"training": {"seed": 6}}, ["training.seed is 6, and 5"]),
        ({"training": {"batch_tokens": 9}}, ["training.batch_tokens is 9, and 512"]),
        ({"training": {"max_updates": 9}}, ["max_updates is 9, and unset in base", "budget"]),
        ({"decoding": {"beam": 1}}, ["decoding.beam is 1, and 2"]),
        ({"evaluation": {"tokenize": "none"}}, ["evaluation.tokenize is none, and unset"]),
        ({"task": "causal", "model": {"kind": "gpt"}}, ["task is causal, and translation"]),
        ({"training": {"start": "run"}}, ["trains from scratch"]),
        ({"model": {"droput": 0.1}}, ["other: unknown key 'model.droput'"]),
        ({"data": 3}, ["'data' must be a section"]),
    ],
)
def test_a_recipe_with_other_conditions_is_refused(other: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        shared(other)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_a_budget_replaces_the_limits_of_all_recipes() -> None:
    for budget in ({"max_updates": 7}, {"max_minutes": 1.5}):
        for settings in shared({"training": {"max_updates": 9, "max_minutes": 3}}, **budget).values():
            limits = settings.training.model_dump(include={"max_updates", "max_epochs", "max_minutes"})
            assert {key: value for key, value in limits.items() if value is not None} == budget


@pytest.mark.parametrize("name", ["", "..", "a/b"])
def test_recipes_that_cannot_be_folders_are_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="rename the recipe"):
        read_recipes({name: BASE}, limits={})


def test_recipes_of_files_are_named_like_them_and_paths_are_relative_to_data(tmp_path: Path) -> None:
    for name in ("x/a.toml", "y/b.toml", "y/a.toml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text('[data]\ntrain = [{ path = "t.tsv" }]\n')
    paths = [tmp_path / "x" / "a.toml", tmp_path / "y" / "b.toml"]
    found = read_recipes(paths, limits={}, data=tmp_path / "text", overrides=["training.lr=0.5"])
    assert {settings.data.train[0].path for settings in found.values()} == {tmp_path / "text" / "t.tsv"}
    assert list(found) == ["a", "b"] and found["b"].training.lr == 0.5
    with pytest.raises(SettingsError, match=r"b: data\.train\.0\.path is"):
        read_recipes(paths, limits={})
    with pytest.raises(SettingsError, match="several recipes are called 'a'"):
        read_recipes([paths[0], tmp_path / "y" / "a.toml"], limits={})


@pytest.mark.parametrize("folder", sorted(RECIPES.iterdir()), ids=lambda path: path.name)
def test_the_recipes_of_a_folder_can_be_compared(folder: Path) -> None:
    paths = sorted(folder.glob("*.toml"))
    for settings in read_recipes(paths, limits={}).values():
        check(settings)
        assert settings.data.valid and settings.data.test
