"""Behaviour common to all tasks: settings without effect are refused, sets have distinct names, leaks are reported."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, get_type_hints
from unittest import mock

import pytest

from transduce.config.kinds import MODEL_SETTINGS, kinds_for, resolve_preset
from transduce.config.recipe import to_toml
from transduce.config.settings import Settings
from transduce.data.store import LabelStore
from transduce.errors import DataError, SettingsError
from transduce.evaluation.options import EVALUATION_OPTIONS
from transduce.logging import Log
from transduce.machine import this_machine
from transduce.models.registry import check_model
from transduce.runs.atomic import read_json
from transduce.runs.folder import RunFolder
from transduce.tasks.defaults import choose
from transduce.tasks.registry import TASKS, WORDINGS, find_task
from transduce.tasks.resolve import check, learn_vocabulary
from transduce.text.special import Vocabulary
from transduce.verification.resume import shortened

QUIET = Log(quiet=True)
SENTENCES = [f"the {who} sees the {what} in the {where} now" for who in ("cat", "dog", "bird") for what in
             ("mouse", "bone", "seed") for where in ("garden", "house", "wood")]  # fmt: skip


def settings(task: str, **sections: Any) -> Settings:
    return Settings.from_mapping({"task": task, **sections})


def test_every_setting_of_data_decoding_and_evaluation_has_an_effect_in_some_task() -> None:
    used = {name for task in TASKS.values() for name in task.uses}
    for section, common in (("data", {"root", "train", "valid", "test", "demo"}), ("decoding", ()), ("evaluation", ())):
        fields = type(getattr(Settings(), section)).model_fields.keys() - set(common)
        assert {f"{section}.{key}" for key in fields} == {name for name in used if name.startswith(f"{section}.")}


def test_every_task_has_its_options_of_evaluate_and_shares_names_only_for_the_same() -> None:
    assert EVALUATION_OPTIONS.keys() == TASKS.keys()
    known: dict[str, Any] = {}
    for options in EVALUATION_OPTIONS.values():
        hints = get_type_hints(options, include_extras=True)
        assert all(known.setdefault(name, hint) == hint for name, hint in hints.items())


@pytest.mark.parametrize("name", WORDINGS)
def test_a_task_defines_what_commands_and_reports_need(name: str) -> None:
    task, wording = TASKS.get(name), WORDINGS[name]
    assert task is None or (task.name, task.wording) == (name, wording)
    assert wording.command.startswith("transduce ")
    words = wording.of(Settings())
    assert "{" not in "".join((words.title, words.command, words.python, words.shape, *words.limits))
    for setting in getattr(task, "inherited", ()):
        section, key = setting.split(".")
        assert key in type(getattr(Settings(), section)).model_fields


@pytest.mark.parametrize(
    ("task", "section", "values"),
    [
        ("causal", "data", {"deduplicate": True}),
        ("causal", "data", {"whole_words": True}),
        ("causal", "decoding", {"beam": 3}),
        ("causal", "tokenizer", {"joint": False}),
        ("masked", "data", {"separate_documents": True}),
        ("masked", "evaluation", {"lowercase": True}),
        ("classification", "data", {"context": 64}),
        ("classification", "training", {"valid_bleu_sentences": 3}),
        ("translation", "data", {"documents": "line"}),
        ("translation", "data", {"labels": ["a", "b"]}),
        ("translation", "tokenizer", {"mask": True}),
    ],
)
def test_settings_without_effect_in_a_task_are_refused(task: str, section: str, values: dict[str, Any]) -> None:
    ((key, _),) = values.items()
    with pytest.raises(SettingsError, match=f"{section}.{key} has no effect in task '{task}'; leave it out"):
        check(settings(task, **{section: values}))


def test_settings_without_effect_may_be_given_at_their_defaults() -> None:
    check(settings("causal", data={"deduplicate": False}, decoding={"beam": 5}))


@pytest.mark.parametrize("task", TASKS)
def test_presets_of_another_family_are_refused_by_name(task: str) -> None:
    own = {name for kind in kinds_for(task) for name in MODEL_SETTINGS[kind].presets}
    assert own
    for preset in {name for section in MODEL_SETTINGS.values() for name in section.presets}:
        asked = settings(task, model={"preset": preset})
        if preset in own:
            check(asked)
            continue
        with pytest.raises(SettingsError, match=f"model.preset = '{preset}' is another kind of model"):
            check(asked)


def write(path: Path, lines: list[str]) -> dict[str, str]:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return {"path": str(path)}


def prepared(tmp_path: Path, asked: Settings, log: Log = QUIET) -> Path:
    task = find_task(asked.task)
    texts = task.read(asked, log)
    tokenizers = learn_vocabulary(lambda: task.lines(texts), asked, log, may_grow=True)
    with RunFolder.create(tmp_path / "run", asked, "") as folder:
        folder.write_settings(asked)
        task.encode(folder, texts, tokenizers, asked, log)
    return tmp_path / "run"


@pytest.mark.parametrize(("tokenizer", "reduced"), [({}, True), ({"kind": "char", "exact": True}, False)])
def test_a_vocabulary_smaller_than_asked_for_is_reported(
    tokenizer: dict[str, Any], reduced: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Except one of all characters, which has no other size."""
    asked = settings("translation", tokenizer={"vocab_size": 5000, **tokenizer})
    for may_grow, said in ((False, "warning: vocabulary: "), (True, "vocabulary: ")):
        found = learn_vocabulary(lambda: (SENTENCES, SENTENCES), asked, Log(), may_grow=may_grow)
        note = f"{said}{found.n_tgt:,} pieces instead of 5,000; the text does not support more"
        assert any(line.startswith(note) for line in capsys.readouterr().err.splitlines()) == reduced


def asked_for(task: str, tmp_path: Path, **data: Any) -> Settings:
    tokenizer = {"vocab_size": 60, "mask": True} if task == "masked" else {"vocab_size": 60}
    context = {} if task == "classification" else {"context": 16}
    more = {"n_labels": 2} if task == "classification" else {}
    labels = {"labels": ["0", "1"]} if task == "classification" else {}
    lines = [f"{i % 2}\t{line}" if task == "classification" else line for i, line in enumerate(SENTENCES)]
    sets = {
        "train": [write(tmp_path / "train.txt", lines[:20])],
        "valid": [write(tmp_path / "valid.txt", lines[18:])],
        "test": [write(tmp_path / part / "valid", lines[15:]) for part in ("a", "b")],
    }
    model = {"preset": "gpt-tiny" if task == "causal" else "bert-tiny", **more}
    return settings(
        task,
        data={**sets, **context, **labels, **data},
        tokenizer=tokenizer,
        model=model,
        training={"batch_tokens": 64},
    )


def test_messages_of_settings_that_a_task_refuses() -> None:
    with pytest.raises(SettingsError, match=r"^weight = 2: .*has no weights; list a file twice"):
        check(settings("causal", data={"train": [{"path": "a.txt", "weight": 2}]}))
    with pytest.raises(SettingsError, match=r"reads label<TAB>text; give path = "):
        check(settings("classification", data={"train": [{"src": "a.txt", "tgt": "b.txt"}]}))
    with pytest.raises(SettingsError, match=r"^tokenizer.exact = false: "):
        check(settings("causal", data={"train": [{"path": "a.txt"}]}, tokenizer={"exact": False}))


@pytest.mark.parametrize("task", ["causal", "masked", "classification"])
def test_sets_have_distinct_names_and_leaks_are_reported(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = prepared(tmp_path, asked_for(task, tmp_path), Log())
    printed = capsys.readouterr().err
    report = read_json(run / "data.json")
    names = ["train", "valid", "valid.1", "valid.2"]
    assert [found["name"] for found in report["sets"]] == names
    assert len(list((run / "tokens").glob("test.[0-9]"))) == 2
    assert [(leak["name"], leak["leaked"], leak["pairs"]) for leak in report["leaks"]] == [
        ("valid", 2, 9), ("valid.1", 5, 12), ("valid.2", 5, 12),
    ]  # fmt: skip
    assert "valid: 2 of 9" in printed and "occur in the training text" in printed


@pytest.mark.parametrize("task", ["causal", "masked", "classification"])
def test_changed_training_text_is_reported(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = asked_for(task, tmp_path)
    run = prepared(tmp_path, asked)
    with RunFolder.create(run, asked, "") as folder:
        assert find_task(task).find_prepared(folder, Log()) is not None
        assert "changed" not in capsys.readouterr().err
        with (tmp_path / "train.txt").open("a") as file:
            file.write("1\tone more\n")
        assert find_task(task).find_prepared(folder, Log()) is not None
        assert "the training text has changed since this run began" in capsys.readouterr().err
        (tmp_path / "train.txt").unlink()
        assert find_task(task).find_prepared(folder, Log()) is not None
        assert "changed" not in capsys.readouterr().err
        (folder.path / "data.json").unlink()
        assert find_task(task).find_prepared(folder, QUIET) is None


def test_next_sentences_need_two_documents(tmp_path: Path) -> None:
    asked = asked_for("masked", tmp_path).with_values("model", next_sentence=True)
    with pytest.raises(DataError, match=r"train text has 1 document: model\.next_sentence = true needs two"):
        prepared(tmp_path, asked)


@pytest.mark.parametrize(
    ("text", "model", "preset"),
    [
        ("a text", {}, "cnn"),
        ("a text", {"dropout": 0.1}, "cnn"),
        ("a text", {"pooling": "mean"}, "bert-tiny"),
        ("a text\tand another", {}, "bert-tiny"),
    ],
)
def test_the_default_classifier_is_a_cnn_for_few_single_texts(
    tmp_path: Path, text: str, model: dict[str, Any], preset: str
) -> None:
    corpus = write(tmp_path / "labels.tsv", [f"{i % 2}\t{text}" for i in range(40)])
    task, asked = find_task("classification"), settings("classification", data={"train": [corpus]}, model=model)
    facts = task.facts(asked, task.read(asked, Log(quiet=True)), this_machine("cpu"))
    assert choose(facts, task.defaults.before_text)[0].model.preset == preset


def test_a_label_that_occurs_only_in_held_out_text_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"common\ttext number {i} is here" for i in range(40)]
    task, found = find_task("classification"), []
    for place in range(40):
        corpus = write(tmp_path / "labels.tsv", [*lines[:place], "rare\tonly one", *lines[place:]])
        texts = task.read(settings("classification", data={"train": [corpus]}), Log())
        assert texts.labels == ("common", "rare")
        found.append(any(example.label == "rare" for example in texts.valid.read()))
    assert any(found) and "label 'rare' does not occur in the training text" in capsys.readouterr().err


def test_large_text_is_split_into_training_and_validation_text_without_loss(tmp_path: Path) -> None:
    numbers = random.Random(1)
    lines = [f"{i} {[numbers.random() for _ in range(9)]}" for i in range(30_000)]  # 6 MB: many compressed blocks
    asked = settings("causal", data={"train": [write(tmp_path / "large.txt", lines)], "documents": "line"})
    texts = find_task("causal").read(asked, QUIET)
    train, valid = ([piece.text.removesuffix("\n") for piece in found.read()] for found in (texts.train, texts.valid))
    assert sorted(filter(None, train + valid)) == sorted(lines) and len(valid) > 1000


RECIPES = sorted((Path(__file__).parents[3] / "recipes").rglob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_no_recipe_has_settings_without_effect(recipe: Path) -> None:
    check(Settings.from_toml(recipe))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("more", [{}, {"tokenizer": {"extend": 5}, "training": {"start": "other"}}], ids=["", "start"])
def test_settings_of_a_trial_training_are_accepted(task: str, more: dict[str, Any], tmp_path: Path) -> None:
    """The resolved settings become a recipe, which the task must accept, also with a vocabulary that has grown."""
    run = settings(task, **more).model_dump(mode="json")
    if task in ("causal", "masked"):
        run["tokenizer"] |= {"exact": True, "normalization": "identity"} if task == "causal" else {"mask": True}
    run["tokenizer"]["vocab_size"] = 305
    run["training"]["track"] = ["wandb"]
    trial = shortened(Settings.from_mapping(run), tmp_path, updates=30, seconds=6.0, log=QUIET)
    (tmp_path / "recipe.toml").write_text(to_toml(trial))
    asked = Settings.from_toml(tmp_path / "recipe.toml")
    check(asked)
    assert (asked.training.max_updates, asked.training.valid_updates, asked.training.track) == (30, 10, ())
    assert asked.tokenizer.vocab_size == (None if more else 305)
    assert asked.training.valid_bleu_sentences == (8 if task == "translation" else 200)


def test_cut_texts_are_reported_with_the_limit_that_cuts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for positions, limit in ((16, "model.max_positions = 16"), (64, "data.max_length = 32")):
        model = {"positions": "learned", "max_positions": positions, "d_model": 8, "d_ff": 8, "n_heads": 2}
        asked = asked_for("classification", tmp_path, max_length=32).with_values("model", **model)
        store = mock.Mock(spec=LabelStore, facts={"longest": 3})
        TASKS["classification"].check_set(store, "train text", mock.Mock(spec=Vocabulary), asked, Log())
        assert f"3 texts fill or exceed {limit};" in capsys.readouterr().err


def test_a_full_disk_is_no_unreadable_text_of_a_trial_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transduce.verification.resume.LONG", 1)
    asked = settings("causal", data={"train": [write(tmp_path / "long.txt", ["a"])], "documents": "line"})
    (tmp_path / "train0.path.txt").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        shortened(asked, tmp_path, updates=30, seconds=6.0, log=QUIET)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            {"kind": "rnn", "attention": "bahdanau", "input_feeding": False},
            "no effect with model.attention = 'bahdanau'",
        ),
        ({"kind": "rnn", "attention": "bahdanau", "readout_scale": 1.0}, "readout_scale = 1.0 has no effect"),
        ({"summary_tokens": 4}, "summary_tokens = 4 has no effect without the pattern 'fixed'"),
        ({"factors": "layers", "decoder_pattern": "local", "window": 8}, "factors = 'layers' has no effect"),
        ({"summary_tokens": 9, "decoder_pattern": "fixed", "window": 4}, "is more than model.window = 4"),
        (
            {"factors": "layers", "encoder_pattern": "strided", "window": 4, "n_encoder_layers": 1},
            "needs at least 2 layers",
        ),
    ],
)
def test_model_settings_without_effect_are_refused_but_load(model: dict[str, Any], said: str) -> None:
    settings = Settings.from_mapping({"model": model})
    with pytest.raises(SettingsError, match=said):
        check(settings)
    check_model(resolve_preset(settings.model))
