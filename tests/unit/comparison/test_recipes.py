"""Comparisons: what recipes share and may not differ in; scores and tests compared with sacreBLEU."""

import random
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sacrebleu.metrics import BLEU

from transduce.comparison.compare import RecipeComparison, RunMeasures, read_recipes, system_of
from transduce.config.settings import Settings
from transduce.errors import SettingsError
from transduce.evaluation.significance import MEASURES, Outputs, paired_bootstrap, ratio_of
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


BLEU_SCORE = MEASURES["BLEU"].score
TEXT = "Ein kleiner Hund läuft über die grüne Wiese , und zwei Kinder schauen ihm zu ."
WORDS = TEXT.split()


def corpus(n: int, seed: int = 1) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(4, 14))) for _ in range(n)]


def worse(lines: list[str], rate: float, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) if draw.random() < rate else w for w in line.split()) for line in lines]


def statistics_of(hypotheses: list[str], references: list[str]) -> np.ndarray:
    return np.array(BLEU()._extract_corpus_statistics(hypotheses, [references]), dtype=np.float64)


def run(lines: list[str], references: list[str], **values: object) -> RunMeasures:
    given = {
        "n_parameters": 100, "updates": 10, "seconds": 60.0, "tokens_per_second": 5.0, "memory": None, "nll": 2.0,
        "sets": (Outputs("test", "BLEU", statistics_of(lines, references)),),
    }  # fmt: skip
    return RunMeasures(**{**given, **values})  # type: ignore[arg-type]


def test_the_test_of_several_seeds_compares_their_means() -> None:
    references = corpus(60)
    sides = [[worse(references, rate, seed) for seed in range(3)] for rate in (0.2, 0.4)]
    found = paired_bootstrap(
        *([statistics_of(one, references) for one in side] for side in sides), MEASURES["BLEU"].score
    )
    means = [statistics.fmean(BLEU().corpus_score(one, [references]).score for one in side) for side in sides]
    assert found.difference == pytest.approx(means[0] - means[1])
    assert found.interval[0] < found.difference < found.interval[1] and found.verdict == "better"
    both = [statistics_of(one, references) for one in sides[0]]
    same = paired_bootstrap(both, both, BLEU_SCORE)
    assert (same.difference, same.p_value) == (0, 1)


def test_lower_is_better_where_the_measure_says_so() -> None:
    draw = np.random.default_rng(1)
    low, high = (np.stack([draw.uniform(a, a + 1, 50), np.ones(50)], 1) for a in (0, 1))
    found = paired_bootstrap([low], [high], ratio_of, higher_is_better=False)
    assert found.verdict == "better" and found.difference < 0
    assert paired_bootstrap([low[:1]], [high[:1]], ratio_of).p_value == 1


def test_the_table_has_a_row_per_recipe_with_means_over_seeds() -> None:
    references = corpus(100)
    runs = {
        name: {Path(name, str(seed)): run(worse(references, rate, seed), references, nll=rate) for seed in (1, 2)}
        for name, rate in (("a", 0.4), ("b", 0.1))
    }
    first = list(runs["a"].values())
    systems = [system_of(name, runs[name], first) for name in ("a", "b")]
    found = RecipeComparison(
        measure="BLEU", signature="s", systems=systems, conditions="same", failed={},
    )  # fmt: skip
    header, (one, two) = found.table()
    values = [one.sets[0].value for one in runs["b"].values()]
    assert two[header.index("BLEU test")] == f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"
    assert one[header.index("against the first")] == "" and two[header.index("against the first")].endswith("*")
    assert systems[1].differences["test"].verdict == "better"  # type: ignore[union-attr]
    assert found.to_json()["systems"][1]["scores"]["test"] == values


def test_outputs_survive_json() -> None:
    references = corpus(5)
    one = run(references, references).sets[0]
    found = Outputs.from_json(one.to_json())
    assert found.value == one.value == pytest.approx(100) and found.signature == one.signature
    for key, value in (("measure", "x"), ("statistics", [1, 2])):
        with pytest.raises(ValueError, match="statistics"):
            Outputs.from_json({**one.to_json(), key: value})
