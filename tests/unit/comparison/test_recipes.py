"""The recipes of a comparison: what they share, what they may not differ in, and their sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from transduce.cli.compare import parse_budget
from transduce.comparison.conditions import TOLERANCE, scale, with_vocabulary_of
from transduce.comparison.recipes import Budget, read_recipes, with_shared_conditions
from transduce.config.architectures import BertClassifierSettings, GPTSettings, TransformerSettings
from transduce.config.kinds import model_settings, resolve_preset
from transduce.config.settings import Settings
from transduce.errors import SettingsError
from transduce.models.registry import build_model, count_parameters
from transduce.tasks.resolve import check

RECIPES = Path(__file__).parents[3] / "recipes" / "compare"
BASE: dict[str, Any] = {
    "data": {"train": [{"src": "a.en", "tgt": "a.de"}], "max_length": 100},
    "tokenizer": {"vocab_size": 300, "sampling": 0.1},
    "training": {"batch_tokens": 512, "max_epochs": 3, "lr": 0.01, "seed": 5},
    "decoding": {"beam": 2},
}


NO_BUDGET = Budget()


def shared(other: dict[str, Any], budget: Budget = NO_BUDGET) -> dict[str, Settings]:
    return with_shared_conditions(read_recipes({"base": BASE, "other": other}), budget)


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
        ({"data": {"train": [{"src": "b.en", "tgt": "a.de"}]}}, ["data.train is"]),
        ({"tokenizer": {"kind": "bpe"}}, ["tokenizer.kind is bpe, and unigram in base"]),
        ({"training": {"seed": 6}}, ["training.seed is 6, and 5"]),
        ({"training": {"batch_tokens": 9}}, ["training.batch_tokens is 9, and 512"]),
        ({"training": {"max_updates": 9}}, ["max_updates is 9, and unset in base", "budget"]),
        ({"decoding": {"beam": 1}}, ["decoding.beam is 1, and 2"]),
        ({"evaluation": {"tokenize": "none"}}, ["evaluation.tokenize is none, and 13a"]),
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
    for budget, limit in (
        (Budget(updates=7), {"max_updates": 7}),
        (Budget(minutes=1.5), {"max_minutes": 1.5}),
    ):
        for settings in shared({"training": {"max_updates": 9, "max_minutes": 3}}, budget).values():
            limits = settings.training.model_dump(include={"max_updates", "max_epochs", "max_minutes"})
            assert {key: value for key, value in limits.items() if value is not None} == limit


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("", Budget()),
        ("minutes=10,params=2.6M", Budget(minutes=10, params=2_600_000)),
        ("updates=2k, params=1e5", Budget(updates=2000, params=100_000)),
    ],
)
def test_budgets_are_read(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("minuts=10", "did you mean 'minutes'?"),
        ("tokens=20M", "allowed: minutes=10, updates=2000"),
        ("updates", "is not a number"),
        ("updates=ten", "'ten' is not a number"),
        ("updates=0", "must be above 0"),
        ("minutes=nan", "is not a number"),
        ("params=-5", "is not a number"),
        ("updates=0.3", "updates must be a whole number"),
        ("minutes=1,updates=3", "a training has one limit"),
        ("updates=1,updates=3", "given twice"),
    ],
)
def test_bad_budgets_are_refused(text: str, part: str) -> None:
    with pytest.raises(SettingsError, match="budget") as caught:
        parse_budget(text)
    assert part in str(caught.value)


def test_budgets_are_described_with_the_limits_that_all_trainings_share() -> None:
    training = Settings.from_mapping({"training": {"max_updates": 2_000_000, "max_minutes": 0.5}}).training
    for budget, text in (
        (Budget(), "2,000,000 updates or 0.5 minutes"),
        (Budget(params=1000), "2,000,000 updates or 0.5 minutes, about 1,000 parameters (widths scaled)"),
    ):
        assert budget.describe(training) == text


@pytest.mark.parametrize("name", ["", "..", "a/b", "shared"])
def test_recipes_that_cannot_be_folders_are_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="rename the recipe"):
        read_recipes({name: BASE})


def test_recipes_of_files_are_named_like_them_and_paths_are_relative_to_data(tmp_path: Path) -> None:
    for name in ("x/a.toml", "y/b.toml", "y/a.toml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text('[data]\ntrain = [{ path = "t.tsv" }]\n')
    paths = [tmp_path / "x" / "a.toml", tmp_path / "y" / "b.toml"]
    found = with_shared_conditions(read_recipes(paths, data=tmp_path / "text", overrides=["training.lr=0.5"]), Budget())
    assert {settings.data.train[0].path for settings in found.values()} == {tmp_path / "text" / "t.tsv"}
    assert list(found) == ["a", "b"] and found["b"].training.lr == 0.5
    with pytest.raises(SettingsError, match=r"b: data\.train is"):
        with_shared_conditions(read_recipes(paths), Budget())
    with pytest.raises(SettingsError, match="several recipes are called 'a'"):
        read_recipes([paths[0], tmp_path / "y" / "a.toml"])


def test_the_vocabulary_of_a_run_replaces_the_settings_of_an_own_one() -> None:
    found = with_vocabulary_of(shared({})["other"], Path("/runs/first"))
    assert found.tokenizer.model_fields_set == {"sampling", "start"} and found.tokenizer.start == Path("/runs/first")


@pytest.mark.parametrize("n_parameters", [60_000, 2_600_000, 40_000_000])
@pytest.mark.parametrize(
    "model",
    [
        TransformerSettings(),
        TransformerSettings(preset="base", d_ff=512, n_heads=4, decoder_self="ssru"),
        GPTSettings(n_decoder_layers=2, n_heads=1, positions="rotary", tie="none"),
        BertClassifierSettings(preset="cnn", n_labels=3),
    ],
    ids=lambda model: model.kind,
)
def test_widths_are_scaled_to_a_number_of_parameters(model: Any, n_parameters: int) -> None:
    found = scale(model, n_parameters, n_src=500, n_tgt=500)
    n = count_parameters(build_model(found, n_src=500, n_tgt=500)) if n_parameters < 1e7 else n_parameters
    assert abs(n - n_parameters) <= TOLERANCE * n_parameters
    before, after = (resolve_preset(one).model_dump() for one in (model, found))
    assert {key for key in before if before[key] != after[key]} <= {"d_model", "d_ff"}
    assert after["d_ff"] / after["d_model"] == pytest.approx(before["d_ff"] / before["d_model"], rel=0.05)


@pytest.mark.parametrize("n_parameters", [1000, 10**13, 10**30])
@pytest.mark.parametrize("kind", ["transformer", "rnn", "convs2s", "star-classifier"])
def test_a_number_of_parameters_that_no_width_gives_is_refused(kind: str, n_parameters: int) -> None:
    model = model_settings(kind=kind, **({"n_labels": 2} if kind == "star-classifier" else {}))
    with pytest.raises(SettingsError, match=rf"params = {n_parameters}: the nearest size .* has [0-9,]+ parameters"):
        scale(model, n_parameters, n_src=500, n_tgt=500)


@pytest.mark.parametrize("folder", sorted(RECIPES.iterdir()), ids=lambda path: path.name)
def test_the_recipes_of_a_folder_can_be_compared(folder: Path) -> None:
    paths = sorted(folder.glob("*.toml"))
    for settings in with_shared_conditions(read_recipes(paths), Budget()).values():
        check(settings)
        assert settings.data.valid and settings.data.test
