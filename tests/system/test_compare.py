"""`transduce compare`: translators, language models and classifiers; kills, later recipes and seeds, mistakes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from sacrebleu.metrics import BLEU

import kills
from system.commands import Done, transduce, write_corpus
from transduce import Budget, Translator, compare
from transduce.comparison.conditions import scale
from transduce.comparison.measures import SCORES_FILE
from transduce.errors import SettingsError
from transduce.runs.folder import RunFolder
from transduce.runs.lock import FolderLock
from transduce.text.tokenizer import load_tokenizers

BASE = """
[data]
train = [{ src = "train.en", tgt = "train.de" }]
valid = [{ src = "valid.en", tgt = "valid.de" }]
test = [{ src = "test.en", tgt = "test.de" }]

[tokenizer]
vocab_size = 300

[model]
d_model = 32
d_ff = 64
n_heads = 2
n_encoder_layers = 1
n_decoder_layers = 1

[training]
batch_tokens = 512
max_updates = 12
valid_updates = 6
save_updates = 3
precision = "float32"
valid_bleu_sentences = 4

[decoding]
max_length = 20
"""
WIDE = """
[model]
d_model = 64
d_ff = 64
n_heads = 4
n_encoder_layers = 1
n_decoder_layers = 1
decoder_self = "ssru"

[training]
lr = 0.01
label_smoothing = 0.0
save_updates = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare")
    write_corpus(path, "train", 300)
    write_corpus(path, "valid", 30, split="valid")
    write_corpus(path, "test", 60, split="test")
    (path / "base.toml").write_text(BASE)
    (path / "wide.toml").write_text(WIDE)
    return path


def run(folder: Path, name: str, *options: object, recipes: tuple[str, ...] = ("base", "wide")) -> Done:
    return transduce("compare", *(folder / f"{recipe}.toml" for recipe in recipes), "--run", folder / name, *options)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Done:
    done = run(folder, "plain", "--seeds", 2, "--json")
    assert done.code == 0, done.err
    return done


def runs(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/seed*/manifest.json"))


def test_all_runs_share_text_vocabulary_and_batches(folder: Path, plain: Done) -> None:
    found = runs(folder / "plain")
    names = [path.relative_to(folder / "plain").as_posix() for path in found]
    assert names == ["base/seed1", "base/seed2", "wide/seed1", "wide/seed2"]
    folders = list(map(RunFolder.open, found))
    assert len({load_tokenizers(one).src.model for one in folders}) == 1
    assert len({str(one.settings.data.train) for one in folders}) == 1
    assert [one.settings.training.seed for one in folders] == [1, 2, 1, 2]
    n_targets = [[event["n_targets"] for event in kills.events(path, "update")] for path in found]
    assert n_targets[0] == n_targets[2] and n_targets[1] == n_targets[3]
    assert folders[2].settings.model.model_dump()["decoder_self"] == "ssru"


def test_the_numbers_are_those_of_the_runs(folder: Path, plain: Done) -> None:
    found = json.loads(plain.out)
    assert found == json.loads((folder / "plain" / "compare.json").read_text())
    sources, references = ((folder / f"test.{side}").read_text().splitlines() for side in ("en", "de"))
    for system in found["systems"]:
        paths = [folder / "plain" / system["name"] / f"seed{seed}" for seed in (1, 2)]
        bleu = []
        for path in paths:
            translator = Translator.load(path, device="cpu")
            output = [one.text for one in translator.translate(sources)]
            bleu.append(BLEU().corpus_score(output, [references]).score)
        assert system["scores"]["test"] == pytest.approx(bleu)
        assert system["n_parameters"] == sum(p.numel() for p in translator.model.parameters())
        validations = {event["update"]: event["nll"] for event in kills.events(paths[0], "validation")}
        (end,) = kills.events(paths[0], "end")
        assert system["nll"][0] == pytest.approx(validations[end["best_update"]])
        assert len(system["curves"]["nll"]) == len(system["curves"]["bleu"]) == 2
        assert system["updates"] == 12 and system["tokens_per_second"] > 0
        assert found["speeds"]["per_second"][system["name"]] > 0
        assert sys.platform != "linux" or system["memory"] > 50e6
    assert found["systems"][1]["differences"]["test"].keys() >= {"difference", "p_value", "verdict"}
    assert (
        found["settings"]["wide"]["model.decoder_self"] == "ssru" and "training.seed" not in found["settings"]["wide"]
    )
    page = (folder / "plain" / "compare.html").read_text()
    assert page.count("<figure") == 3 and not re.search(r"(?:src|href)=.https?://", page)
    for address in re.findall(r'href="([^"]+)"', page):
        assert (folder / "plain" / address).exists()


def test_a_second_call_trains_nothing_and_recipes_and_seeds_can_be_added(folder: Path, plain: Done) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.glob("plain/*/*/*") if path.is_file()}
    text, aside = folder / "test.en", folder / "aside"
    text.rename(aside)  # the scores are stored
    again = run(folder, "plain", "--seeds", 2, "--json")
    aside.rename(text)
    assert again.code == 0, again.err
    assert json.loads(again.out) == json.loads(plain.out)
    (folder / "deep.toml").write_text(WIDE.replace("n_encoder_layers = 1", "n_encoder_layers = 2"))
    done = run(folder, "plain", "--seeds", 1, "--quiet", recipes=("base", "deep"))
    assert done.code == 0, done.err
    assert "deep" in done.out and "BLEU test" in done.out and "wide" not in done.out
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_language_models_are_compared_by_bits_per_byte(folder: Path) -> None:
    given: dict[str, Any] = {
        "task": "causal",
        "data": {"train": [{"path": str(folder / "train.en")}], "valid": [{"path": str(folder / "valid.en")}]},
        "model": {"d_model": 32, "d_ff": 64, "n_heads": 2, "n_decoder_layers": 1},
        "training": {"batch_tokens": 512, "max_epochs": 1},
    }
    given["data"]["context"] = 32
    alibi = {"model": {**given["model"], "positions": "alibi"}}
    found = compare({"rotary": given, "alibi": alibi}, folder / "lm", budget=Budget(updates=10, params=40_000))
    assert found.measure == "bits per byte" and found.systems[1].differences == {"valid": None}
    for system in found.systems:
        folder_ = RunFolder.open(folder / "lm" / system.name / "seed1")
        (scores,) = folder_.read_record("text_scores.json")["sets"]
        assert system.scores["valid"] == pytest.approx([scores["bits_per_byte"]])
        assert system.updates == 10 and abs(system.n_parameters - 40_000) <= 4000
        model, n = folder_.settings.model, load_tokenizers(folder_).n_tgt
        assert model.d_model == scale(model, 40_000, n_src=n, n_tgt=n).d_model != 32
    assert "40,000 parameters" in "\n".join(found.lines())


def test_settings_that_the_first_recipe_leaves_unset_are_shared_too(folder: Path) -> None:
    sizes = {"d_model": 16, "d_ff": 32, "n_heads": 2, "n_decoder_layers": 1}
    given = {
        "task": "causal",
        "data": {"train": [{"path": str(folder / "train.en")}], "valid": [{"path": str(folder / "valid.en")}]},
        "tokenizer": {"vocab_size": 300},
        "model": sizes,
    }
    recipes = {"gpt": given, "learned": {"model": {**sizes, "positions": "learned", "max_positions": 64}}}
    budget = Budget(minutes=0.005)
    found = compare(recipes, folder / "unset", budget=budget, seeds=2)
    settings = [RunFolder.open(path).settings for path in runs(folder / "unset")]
    assert len(settings) == 4
    for name in ("batch_tokens", "precision", "valid_updates", "max_epochs", "max_minutes"):
        assert len({getattr(one.training, name) for one in settings}) == 1, name
    (context,) = {one.data.context for one in settings}
    assert context is not None and settings[0].training.max_minutes is None
    assert f"batches of {settings[0].training.batch_tokens:,} tokens" in found.conditions[0]
    assert found.conditions[1].endswith("0.005 minutes")

    shutil.move(folder / "unset", folder / "moved")  # and with a setting that does not affect the result
    again = compare(recipes, folder / "moved", budget=budget, seeds=2, overrides=["training.save_updates=1000"])
    assert [one.scores for one in again.systems] == [one.scores for one in found.systems]
    recipes["learned"]["model"] = {**sizes, "positions": "learned", "max_positions": context - 1}
    with pytest.raises(SettingsError, match="max_positions"):
        compare(recipes, folder / "short", budget=budget)
    assert not (folder / "short").exists()


def test_classifiers_are_compared_by_accuracy(tmp_path: Path) -> None:
    for name, n in (("train", 80), ("valid", 50)):
        lines = [f"{'good' if i % 3 else 'bad'}\tthe film {'shines' if i % 3 else 'drags'} {i}\n" for i in range(n)]
        (tmp_path / f"{name}.tsv").write_text("".join(lines))
    model = {"n_encoder_layers": 1, "d_model": 32, "d_ff": 64, "n_heads": 2}
    given = {
        "task": "classification",
        "data": {name: [{"path": str(tmp_path / f"{name}.tsv")}] for name in ("train", "valid")},
        "tokenizer": {"vocab_size": 60},
        "model": {**model, "pooling": "mean"},
        "training": {"batch_tokens": 256, "max_updates": 10},
    }
    found = compare({"mean": given, "first": {"model": {**model, "pooling": "first"}}}, tmp_path / "run")
    for system in found.systems:
        (scores,) = RunFolder.open(tmp_path / "run" / system.name / "seed1").read_record("label_scores.json")["sets"]
        assert system.scores["valid"] == pytest.approx([scores["accuracy"]])
        assert len(system.by_length) >= 1
    assert found.speeds.unit == "texts" and found.systems[1].differences["valid"] is not None


def test_minutes_become_updates_by_speeds_that_are_measured_in_turns(folder: Path) -> None:
    """Also of a recipe that is added later, and when the same command is given again."""
    for recipes in (("base",), ("base", "wide")):
        done = run(folder, "timed", "--budget", "minutes=0.02", recipes=recipes)
        assert done.code == 0 and "measuring speed" in done.err, done.err
    seconds = json.loads((folder / "timed" / "update_budget.json").read_text())
    for name in ("base", "wide"):
        settings = RunFolder.open(folder / "timed" / name / "seed1").settings
        updates = kills.last_update(folder / "timed" / name / "seed1")
        assert settings.training.max_updates == updates == max(1, int(1.2 / seconds[name]))
        assert settings.training.max_minutes is None
        assert f"{name}: 0.02 minutes are {updates} updates" in done.err
    again = run(folder, "timed", "--budget", "minutes=0.02")
    assert again.code == 0 and "measuring speed" not in again.err, again.err


def test_mistakes_are_one_line_before_any_work(folder: Path, plain: Done) -> None:
    (folder / "other.toml").write_text(WIDE + "\n[data]\nmax_length = 9\n")
    (folder / "new.toml").write_text(WIDE.replace("n_heads = 4", "n_heads = 5"))
    (folder / "shared.toml").write_text(WIDE)
    for options, recipes, part in (
        ((), ("base", "other"), "other: data.max_length is 9, and 256 in base"),
        ((), ("base", "new"), "model.n_heads = 5"),
        ((), ("base", "base"), "several recipes are called 'base'"),
        (("--budget", "minuts=3"), ("base",), "did you mean 'minutes'?"),
        (("--budget", "params=10"), ("base",), "base: budget params = 10: the nearest size"),
        (("--data", folder / "nowhere"), ("base",), "cannot read"),
        (("--set", "data.valid=[]", "--seeds", 2), ("base",), "the held-out text would depend on the seed"),
        (("--run", folder / "plain" / "base" / "seed1"), ("base",), "this is a run folder"),
        ((), ("base", "shared"), "rename the recipe"),
        (("--set", "training.optimizer=adma"), ("base",), "base: training.optimizer = 'adma'"),
        (("--run", folder / "base.toml"), ("base",), "base.toml: it is a file; name a folder"),
    ):
        done = run(folder, "never", *options, recipes=recipes)
        assert done.code == 2 and part in done.err and done.err.count("error:") == 1, done.err
        assert not (folder / "never").exists()
    done = run(folder, "plain", "--set", "model.dropout=0.5")
    assert done.code == 2 and "contains another run: model.dropout" in done.err, done.err
    (folder / "changed").mkdir()
    (folder / "changed" / "wide.toml").write_text(WIDE.replace("lr = 0.01", "lr = 0.02"))
    done = run(folder, "plain", recipes=("base", "changed/wide"))
    assert done.code == 2 and "contains another run: training.lr" in done.err, done.err
    lock = FolderLock(folder / "plain")
    done = run(folder, "plain")
    lock.release()
    assert done.code == 2 and "is in use" in done.err and "name another folder" in done.err, done.err


def test_a_training_that_diverges_does_not_stop_the_others(folder: Path) -> None:
    (folder / "bad.toml").write_text(WIDE.replace("lr = 0.01", 'lr = 1e30\noptimizer = "adam"\nwarmup_updates = 0'))
    done = run(folder, "diverged", "--quiet", recipes=("base", "bad", "wide"))
    assert done.code == 1 and "bad" not in done.out.split("failed:")[0], done.err
    assert "not finite" in done.out.split("failed:")[1] and "wide" in done.out


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forkserver")
def test_kills_change_nothing_and_finished_trainings_are_not_repeated(
    folder: Path, processes: ForkServerContext
) -> None:
    """SIGKILL in the first training, in the second, between them, and while the results are collected."""
    recipes, errors = [str(folder / f"{name}.toml") for name in ("base", "wide")], folder / "errors"

    def process(name: str) -> ForkServerProcess:
        command = ["compare", *recipes, "--run", str(folder / name)]
        return processes.Process(target=kills.child, args=(command, str(errors)))

    def finish(name: str) -> None:
        (last := process(name)).start()
        last.join()
        assert last.exitcode == 0, errors.read_text()

    finish("whole")
    whole, killed = folder / "whole", folder / "killed"
    marks = ("base/seed1/checkpoints/u00000006", "base/seed1/report.html", "wide/seed1/checkpoints/u00000003",
             f"wide/seed1/{SCORES_FILE}")  # fmt: skip
    codes = [kills.kill_when(process("killed"), killed / mark) for mark in marks]
    assert set(codes) <= {-signal.SIGKILL, 0}, errors.read_text()
    assert codes.count(-signal.SIGKILL) >= 3, codes  # the last may end before its mark is seen
    finish("killed")
    for name in ("base", "wide"):
        one, two = (path / name / "seed1" for path in (whole, killed))
        assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
        scores = [json.loads((path / SCORES_FILE).read_text())["sets"] for path in (one, two)]
        assert scores[0] == scores[1]
        assert [event["event"] for event in kills.events(two)].count("end") == 1
    found = [json.loads((path / "compare.json").read_text())["systems"] for path in (whole, killed)]
    assert [one["scores"] for one in found[0]] == [one["scores"] for one in found[1]]
