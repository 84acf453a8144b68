"""Behaviour common to all tasks: settings without effect are refused, sets have distinct names, leaks are reported."""

import random
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from transduce.cli.evaluate import Evaluate
from transduce.config.architectures import MODEL_SETTINGS, kinds_for, resolve_preset
from transduce.config.settings import Settings
from transduce.errors import DataError, SettingsError
from transduce.evaluation.wording import WORDINGS
from transduce.logging import Log
from transduce.machine import this_machine
from transduce.models.registry import check_model
from transduce.runs.atomic import read_json
from transduce.runs.folder import RunFolder
from transduce.tasks.base import find_prepared
from transduce.tasks.defaults import DEFAULTS, choose
from transduce.tasks.resolve import TASKS, check, facts_of, find_task, learn_vocabulary

QUIET = Log(quiet=True)
SENTENCES = [f"the {who} sees the {what} in the {where} now" for who in ("cat", "dog", "bird") for what in
             ("mouse", "bone", "seed") for where in ("garden", "house", "wood")]  # fmt: skip


def settings(task: str, **sections: Any) -> Settings:
    return Settings.from_mapping({"task": task, **sections})


def test_every_setting_of_data_decoding_and_evaluation_says_which_tasks_use_it() -> None:
    everywhere = {"data.root", "data.train", "data.valid", "data.test", "data.max_record"}
    for name, traits in Settings().traits():
        assert set(traits.tasks or ()) | set(traits.inherited) <= TASKS.keys(), name
        if name.partition(".")[0] in ("data", "decoding", "evaluation"):
            assert (traits.tasks is None) == (name in everywhere), name


@pytest.mark.parametrize("values", [{"lr": None}, {"precision": "auto"}])
def test_null_and_auto_leave_a_setting_unset(values: dict[str, Any]) -> None:
    assert settings("translation", training=values).training.model_fields_set == set()


def test_the_evaluation_options_of_all_tasks_are_those_of_the_command() -> None:
    command, of_tasks = get_type_hints(Evaluate), dict[str, Any]()
    for task in TASKS.values():
        for name, hint in get_type_hints(task.evaluation).items():
            assert of_tasks.setdefault(name, hint) == hint
            assert name == "decoding" or command[name] == hint | None
    assert of_tasks.keys() - {"decoding"} <= command.keys()


@pytest.mark.parametrize("name", WORDINGS)
def test_reports_have_words_for_every_task(name: str) -> None:
    assert TASKS.keys() <= WORDINGS.keys()
    words = WORDINGS[name].of(Settings())
    assert words.command.startswith("transduce ")
    assert "{" not in "".join((words.title, words.command, words.python, words.shape, *words.limits))


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
        if any(name == preset or name.endswith(f"-{preset}") for name in own):
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
    texts = task.form.read_texts(asked, log)
    tokenizers = learn_vocabulary(texts.lines, asked, log, may_grow=True)
    with RunFolder.create(tmp_path / "run", asked, "") as folder:
        folder.write_settings(asked)
        task.prepare(folder, texts, tokenizers, log)
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
        assert find_prepared(find_task(task), folder, Log()) is not None
        assert "changed" not in capsys.readouterr().err
        with (tmp_path / "train.txt").open("a") as file:
            file.write("1\tone more\n")
        assert find_prepared(find_task(task), folder, Log()) is not None
        assert "the training text has changed since this run began" in capsys.readouterr().err
        (tmp_path / "train.txt").unlink()
        assert find_prepared(find_task(task), folder, Log()) is not None
        assert "changed" not in capsys.readouterr().err
        (folder.path / "data.json").unlink()
        assert find_prepared(find_task(task), folder, QUIET) is None


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
    facts = facts_of(task, asked, task.form.read_texts(asked, Log(quiet=True)), this_machine("cpu"))
    assert choose(facts, DEFAULTS[asked.task].before_text)[0].model.preset == preset


def test_a_label_that_occurs_only_in_held_out_text_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"common\ttext number {i} is here" for i in range(40)]
    task, found = find_task("classification"), []
    for place in range(40):
        corpus = write(tmp_path / "labels.tsv", [*lines[:place], "rare\tonly one", *lines[place:]])
        texts = task.form.read_texts(settings("classification", data={"train": [corpus]}), Log())
        assert texts.labels == ("common", "rare")
        found.append(any(example.label == "rare" for example in texts.valid.read()))
    assert any(found) and "label 'rare' does not occur in the training text" in capsys.readouterr().err


def test_large_text_is_split_into_training_and_validation_text_without_loss(tmp_path: Path) -> None:
    numbers = random.Random(1)
    lines = [f"{i} {[numbers.random() for _ in range(9)]}" for i in range(30_000)]  # 6 MB: many compressed blocks
    asked = settings("causal", data={"train": [write(tmp_path / "large.txt", lines)], "documents": "line"})
    texts = find_task("causal").form.read_texts(asked, QUIET)
    train, valid = ([piece.text.removesuffix("\n") for piece in found.read()] for found in (texts.train, texts.valid))
    assert sorted(filter(None, train + valid)) == sorted(lines) and len(valid) > 1000


RECIPES = sorted((Path(__file__).parents[3] / "recipes").rglob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_no_recipe_has_settings_without_effect(recipe: Path) -> None:
    check(Settings.from_toml(recipe))


def test_cut_texts_are_reported_with_the_limit_that_cuts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for positions, limit in ((16, "model.max_positions = 16"), (64, "data.max_length = 32")):
        model = {"positions": "learned", "max_positions": positions, "d_model": 8, "d_ff": 8, "n_heads": 2}
        asked = asked_for("classification", tmp_path, max_length=32).with_values("model", **model)
        write(tmp_path / "train.txt", [f"{i % 2}\t{line} {line}" for i, line in enumerate(SENTENCES)])
        prepared(tmp_path / limit, asked, Log())
        assert f"train: {len(SENTENCES)} texts fill or exceed {limit};" in capsys.readouterr().err


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


@pytest.mark.parametrize(("second", "split"), [("", True), (" It barks.", False)])
def test_runs_of_paragraphs_do_not_split(second: str, split: bool, tmp_path: Path) -> None:
    lines = [f"Dog {n} runs.{second if n % 3 == 0 else ''}\n" for n in range(300)]
    (tmp_path / "a.en").write_text("".join(lines))
    (tmp_path / "a.de").write_text("".join(lines))
    corpus = {"src": str(tmp_path / "a.en"), "tgt": str(tmp_path / "a.de")}
    asked = Settings.from_mapping({"data": {"train": [corpus], "src_lang": "en"}})
    task = find_task("translation")
    facts = facts_of(task, asked, task.form.read_texts(asked, Log(quiet=True)), this_machine("cpu"))
    settings, choices = choose(facts, DEFAULTS[asked.task].before_text)
    assert settings.decoding.split is split
    (reason,) = [choice.reason for choice in choices if choice.name == "decoding.split"]
    assert reason == f"{'0' if split else '33'} % of the source lines have several sentences"
