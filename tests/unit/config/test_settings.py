import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from transduce.config.architectures import resolve_preset
from transduce.config.recipe import apply_overrides, read_recipe, to_toml
from transduce.config.settings import Settings
from transduce.errors import SettingsError

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.toml"))


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    nested = [field.annotation for field in model.model_fields.values()]
    inner = [part for part in nested if isinstance(part, type) and issubclass(part, BaseModel)]
    return [model, *(section for part in inner for section in sections(part))]


@pytest.mark.parametrize("section", [s for s in sections(Settings) if s is not Settings])
def test_every_setting_is_explained_in_a_sentence(section: type[BaseModel]) -> None:
    for name, field in section.model_fields.items():
        assert field.description and len(field.description) > 10, f"{section.__name__}.{name}"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {"output_bias": "fix"}}, "model.output_bias = 'fix': input should be True, False or 'fixed'"),
        ({"model": {"droput": 0.1}}, "unknown key 'model.droput'; did you mean 'dropout'?"),
        ({"modle": {}}, "unknown key 'modle'; did you mean 'model'?"),
        ({"modle": {"dropout": 0.1}}, "unknown key 'modle'; did you mean 'model'?"),
        ({"train": {"lr": 0.1}}, "unknown key 'train'; did you mean 'training'?"),
        ({"optim": {"lr": 0.1}}, "unknown key 'optim'; known: data, tokenizer, model, training, decoding, evaluation"),
        ({"lr": 0.1}, "unknown key 'lr'; did you mean 'training.lr'?"),
        ({"batch_tokens": 9}, "unknown key 'batch_tokens'; did you mean 'training.batch_tokens' or 'decoding.batch_"),
        ({"training": {"dropout": 0.1}}, "unknown key 'training.dropout'; did you mean 'model.dropout'?"),
        ({"training": {"lrr": 0.1}}, "unknown key 'training.lrr'; did you mean 'lr'?"),
        ({"nmae": "x"}, "unknown key 'nmae'; did you mean 'name'?"),
        ({"model": "tiny"}, "model = 'tiny': a section, not a value; its keys: preset, kind"),
        ({"model": {"xyzzy": 1}}, "unknown key 'model.xyzzy'; known: preset, kind, d_model"),
        ({"data": {"train": [{"source": "a"}]}}, "unknown key 'data.train.0.source'; did you mean 'src'?"),
        ({"model": {"dropout": 1.5}}, "model.dropout = 1.5: input should be less than 1"),
        (
            {"tokenizer": {"kind": "wordpiece"}},
            "tokenizer.kind = 'wordpiece': input should be 'unigram', 'bpe', 'char'",
        ),
        ({"tokenizer": {"normalization": "nmt_nkfc"}}, "'nfkc_cf' or 'identity'; did you mean 'nmt_nfkc'?"),
        ({"training": {"lr": "fast"}}, "training.lr = 'fast': input should be a valid number"),
        ({"data": {"train": [{"src": "a.en"}]}}, "data.train.0: a corpus is either src and tgt, or path"),
        ({"data": {"train": [{"src": "a", "tgt": "b", "path": "c"}]}}, "a corpus is either src and tgt, or path"),
    ],
)
def test_a_bad_value_is_a_one_line_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_mapping(values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_settings_are_frozen_and_round_trip_through_json() -> None:
    settings = Settings.from_mapping({"data": {"train": [{"src": "a", "tgt": "b"}]}, "model": {"d_model": 64}})
    with pytest.raises(Exception, match="frozen"):
        settings.name = "other"  # type: ignore[misc]
    assert Settings.from_mapping(json.loads(settings.model_dump_json())) == settings


def test_with_values_checks_and_leaves_other_settings_unset() -> None:
    settings = Settings.from_mapping({"model": {"preset": "base", "dropout": 0.2}})
    changed = settings.with_values("model", d_ff=100)
    assert changed.model.model_fields_set == {"preset", "kind", "dropout", "d_ff"}
    with pytest.raises(SettingsError, match=r"model\.d_ff"):
        settings.with_values("model", d_ff=0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", 0.1),
        ("true", True),
        ("bpe", "bpe"),
        ('"x y"', "x y"),
        ("[0.9, 0.99]", [0.9, 0.99]),
        ("a=b", "a=b"),
        ("", ""),
        ("[" * 3000, "[" * 3000),  # too deep for TOML
    ],
    ids=lambda value: str(value)[:20],
)
def test_overrides_are_read_as_toml_or_else_as_strings(text: str, value: object) -> None:
    values: dict[str, Any] = {}
    apply_overrides(values, [f"a.b={text}"])
    assert values == {"a": {"b": value}}


@pytest.mark.parametrize("override", ["training.lr", "=3", " =3"])
def test_an_override_without_a_value_is_refused(override: str) -> None:
    with pytest.raises(SettingsError, match="expected key=value"):
        apply_overrides({}, [override])


def test_an_override_cannot_go_through_a_value() -> None:
    with pytest.raises(SettingsError, match="'name' is not a section"):
        apply_overrides({"name": "x"}, ["name.y=1"])


@pytest.mark.parametrize(
    "content", [b"[model", b"\xff\xfe", b"a = " + b"[" * 3000, b"a = 1979-13-45", b"a = 1" + b"0" * 5000]
)
def test_a_recipe_that_is_not_toml_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.toml").write_bytes(content)
    with pytest.raises(SettingsError, match=r"x\.toml is not valid TOML"):
        Settings.from_toml(tmp_path / "x.toml")
    with pytest.raises(SettingsError, match="cannot read recipe"):
        Settings.from_toml(tmp_path / "none.toml")


def test_data_paths_start_from_the_recipe_or_from_data_root(tmp_path: Path) -> None:
    recipe = tmp_path / "x.toml"
    recipe.write_text('[data]\nroot = "texts"\ntrain = [{ src = "a.en", tgt = "/abs/a.de" }]\n')
    assert Settings.from_toml(recipe).data.train[0].src == tmp_path / "texts" / "a.en"
    assert Settings.from_toml(recipe).data.train[0].tgt == Path("/abs/a.de")
    moved = Settings.from_toml(recipe, [f"data.root={json.dumps(str(tmp_path / 'elsewhere'))}"])
    assert moved.data.train[0].src == tmp_path / "elsewhere" / "a.en"


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(name=words, folder=words.filter(lambda word: "\0" not in word), lr=st.floats(1e-9, 1.0), joint=st.booleans())
def test_a_recipe_written_from_settings_gives_the_same_settings(name: str, folder: str, lr: float, joint: bool) -> None:
    corpus = {"src": f"/{folder}/a", "tgt": "/b", "weight": 0.5}
    values = {"name": name, "data": {"train": [corpus]}, "training": {"lr": lr}, "tokenizer": {"joint": joint}}
    settings = Settings.from_mapping(values)
    text = to_toml(settings)
    again = Settings.from_mapping(tomllib.loads(text))
    assert again == settings
    assert again.model_fields_set == settings.model_fields_set


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_documents_what_to_expect(recipe: Path) -> None:
    from transduce.models.registry import check_model

    settings = Settings.from_toml(recipe)
    check_model(resolve_preset(settings.model))
    assert settings.data.train and (settings.data.valid or settings.task == "masked")
    assert settings.data.test or settings.task != "translation"
    header = recipe.read_text(encoding="utf-8").split("\n\n")[0]
    for word in ("Score:", "Time:", "Machine:", "Data:"):
        assert f"# {word}" in header


@pytest.mark.parametrize(
    ("model", "facts"),
    [
        ({"kind": "gpt", "n_encoder_layers": 1}, ("model.n_encoder_layers", "model.kind = 'gpt'", "transformer")),
        ({"kind": "bert", "poling": "mean"}, ("model.poling", "known")),
        ({"pooling": "mean"}, ("model.pooling", "'transformer'", "bert-classifier")),
        ({"kind": "bert-classifier", "poling": "mean"}, ("model.poling", "did you mean 'pooling'")),
        ({"kind": "gtp"}, ("model.kind = 'gtp'", "did you mean 'gpt'", "bert-encoder")),
        ({"kind": 3}, ("model.kind = 3", "transformer")),
    ],
)
def test_each_architecture_has_its_own_settings(model: dict[str, Any], facts: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_mapping({"model": model})
    assert all(fact in str(caught.value) for fact in facts), caught.value


def test_the_task_decides_the_architecture_unless_one_is_given() -> None:
    kinds = {task: Settings.from_mapping({"task": task}).model.kind for task in ("causal", "masked", "classification")}
    assert kinds == {"causal": "gpt", "masked": "bert", "classification": "bert-classifier"}
    assert Settings().model.kind == "transformer"
    given = Settings.from_mapping({"task": "causal", "model": {"preset": "gpt2"}}).with_values("model", dropout=0.2)
    assert (given.model.kind, given.model.preset, given.model.dropout) == ("gpt", "gpt2", 0.2)


@pytest.mark.parametrize(
    ("task", "short", "name"),
    [("causal", "tiny", "gpt-tiny"), ("masked", "small", "bert-small"), ("classification", "mini", "bert-mini")],
)
def test_sizes_have_the_same_short_names_in_all_tasks(task: str, short: str, name: str) -> None:
    models = [Settings.from_mapping({"task": task, "model": {"preset": preset}}).model for preset in (short, name)]
    one, other = (resolve_preset(model).model_dump(exclude={"preset"}) for model in models)
    assert one == other
    with pytest.raises(SettingsError, match="another kind of model"):
        resolve_preset(Settings.from_mapping({"task": task, "model": {"preset": "big"}}).model)


def test_a_recipe_extends_another_one(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.toml").write_text('name = "a"\n[model]\nd_model = 64\nd_ff = 8\n[training]\nlr = 0.1\n')
    (tmp_path / "sub" / "b.toml").write_text('extends = "../a.toml"\n[model]\nd_model = 32\n[decoding]\nbeam = 2\n')
    (tmp_path / "c.toml").write_text('extends = "sub/b.toml"\nname = "c"\n[model]\nn_heads = 2\n')
    expected = {"name": "c", "model": {"d_model": 32, "d_ff": 8, "n_heads": 2}, "training": {"lr": 0.1}}
    assert read_recipe(tmp_path / "c.toml") == {**expected, "decoding": {"beam": 2}}
    assert Settings.from_toml(tmp_path / "c.toml").model.d_ff == 8


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("extends = 3", "extends = 3: name a recipe file"),
        ('extends = "r.toml"', "extends = 'r.toml': name a recipe file; at most 8"),
        ('extends = "none.toml"', "cannot read recipe"),
        ('extends = "."', "is not a file"),
    ],
)
def test_a_bad_extension_is_a_one_line_error(text: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_recipe(tmp_path / "r.toml")
    assert part in str(caught.value)
