"""`transduce compare`: translators, language models and classifiers; kills, later recipes and seeds, mistakes."""

import json
import shutil
import signal
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from sacrebleu.metrics import BLEU

import kills
from system.commands import Done, succeed, transduce, write_corpus
from transduce import Translator, compare
from transduce.comparison.compare import SCORES_FILE
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


def command(folder: Path, name: str, *options: object, recipes: Sequence[str] = ("base", "wide")) -> list[object]:
    return ["compare", *(folder / f"{recipe}.toml" for recipe in recipes), "--run", folder / name, *options]


@pytest.fixture(scope="module")
def plain(folder: Path) -> Done:
    return succeed(*command(folder, "plain", "--seeds", 2, "--json"))


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
        assert system["updates"] == 12 and system["tokens_per_second"] > 0
        assert sys.platform != "linux" or system["memory"] > 50e6
    assert found["systems"][1]["differences"]["test"].keys() >= {"difference", "p_value", "verdict"}
    assert "12 updates" in found["conditions"] and "seeds 1 to 2" in found["conditions"]


def test_a_second_call_trains_nothing_and_recipes_and_seeds_can_be_added(folder: Path, plain: Done) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.glob("plain/*/*/*") if path.is_file()}
    text, aside = folder / "test.en", folder / "aside"
    text.rename(aside)  # the scores are stored
    again = transduce(*command(folder, "plain", "--seeds", 2, "--json"))
    aside.rename(text)
    assert again.code == 0, again.err
    assert json.loads(again.out) == json.loads(plain.out)
    (folder / "deep.toml").write_text(WIDE.replace("n_encoder_layers = 1", "n_encoder_layers = 2"))
    done = succeed(*command(folder, "plain", "--seeds", 1, "--quiet", recipes=("base", "deep")))
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
    found = compare({"rotary": given, "alibi": alibi}, folder / "lm", updates=10)
    assert found.measure == "bits per byte" and found.systems[1].differences == {"valid": None}
    for system in found.systems:
        folder_ = RunFolder.open(folder / "lm" / system.name / "seed1")
        (scores,) = folder_.read_record("text_scores.json")["sets"]
        assert system.scores["valid"] == pytest.approx([scores["bits_per_byte"]])
        assert system.updates == 10 and folder_.settings.training.max_epochs is None
    assert "10 updates" in found.lines()[0]


def test_settings_that_the_first_recipe_leaves_unset_are_shared_too(folder: Path) -> None:
    sizes = {"d_model": 16, "d_ff": 32, "n_heads": 2, "n_decoder_layers": 1}
    given = {
        "task": "causal",
        "data": {"train": [{"path": str(folder / "train.en")}], "valid": [{"path": str(folder / "valid.en")}]},
        "tokenizer": {"vocab_size": 300},
        "model": sizes,
    }
    recipes = {"gpt": given, "learned": {"model": {**sizes, "positions": "learned", "max_positions": 64}}}
    found = compare(recipes, folder / "unset", minutes=0.005, seeds=2)
    settings = [RunFolder.open(path).settings for path in runs(folder / "unset")]
    assert len(settings) == 4
    for name in ("batch_tokens", "precision", "valid_updates", "max_epochs", "max_minutes"):
        assert len({getattr(one.training, name) for one in settings}) == 1, name
    (context,) = {one.data.context for one in settings}
    assert context is not None and settings[0].training.max_minutes == 0.005
    assert f"batches of {settings[0].training.batch_tokens:,} tokens" in found.conditions
    assert found.conditions.endswith("0.005 minutes")

    shutil.move(folder / "unset", folder / "moved")  # and with a setting that does not affect the result
    again = compare(recipes, folder / "moved", minutes=0.005, seeds=2, overrides=["training.save_updates=1000"])
    assert [one.scores for one in again.systems] == [one.scores for one in found.systems]
    recipes["learned"]["model"] = {**sizes, "positions": "learned", "max_positions": context - 1}
    with pytest.raises(SettingsError, match="max_positions"):
        compare(recipes, folder / "short", minutes=0.005)
    assert not (folder / "short").exists()


def test_mistakes_are_one_line_before_any_work(folder: Path, plain: Done) -> None:
    (folder / "other.toml").write_text(WIDE + "\n[data]\nmax_length = 9\n")
    (folder / "new.toml").write_text(WIDE.replace("n_heads = 4", "n_heads = 5"))
    for options, recipes, part in (
        ((), ("base", "other"), "other: data.max_length is 9, and 256 in base"),
        ((), ("base", "new"), "model.n_heads = 5"),
        ((), ("base", "base"), "several recipes are called 'base'"),
        (("--updates", 0), ("base",), "training.max_updates = 0"),
        (("--minutes", "nan"), ("base",), "training.max_minutes = nan"),
        (("--data", folder / "nowhere"), ("base",), "cannot read"),
        (("--set", "data.valid=[]", "--seeds", 2), ("base",), "the held-out text would depend on the seed"),
        (("--run", folder / "plain" / "base" / "seed1"), ("base",), "this is a run folder"),
        (("--set", "training.optimizer=adma"), ("base",), "base: training.optimizer = 'adma'"),
        (("--run", folder / "base.toml"), ("base",), "base.toml: it is a file; name a folder"),
    ):
        done = transduce(*command(folder, "never", *options, recipes=recipes))
        assert done.code == 2 and part in done.err and done.err.count("error:") == 1, done.err
        assert not (folder / "never").exists()
    done = transduce(*command(folder, "plain", "--set", "model.dropout=0.5"))
    assert done.code == 2 and "contains another run: model.dropout" in done.err, done.err
    (folder / "changed").mkdir()
    (folder / "changed" / "wide.toml").write_text(WIDE.replace("lr = 0.01", "lr = 0.02"))
    done = transduce(*command(folder, "plain", recipes=("base", "changed/wide")))
    assert done.code == 2 and "contains another run: training.lr" in done.err, done.err
    (folder / "front.toml").write_text(BASE.replace("vocab_size = 300", "vocab_size = 200"))
    done = transduce(*command(folder, "plain", recipes=("front", "wide")))
    assert done.code == 2 and "contains another run: tokenizer.start" in done.err, done.err
    assert not (folder / "plain" / "front").exists()
    notes = folder / "kept" / "base" / "seed1" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("not a run")
    done = transduce(*command(folder, "kept"))
    assert done.code == 2 and notes.exists(), done.err
    lock = FolderLock(folder / "plain")
    done = transduce(*command(folder, "plain"))
    lock.release()
    assert done.code == 2 and "is in use" in done.err and "name another folder" in done.err, done.err


def test_a_training_that_diverges_does_not_stop_the_others(folder: Path) -> None:
    (folder / "bad.toml").write_text(WIDE.replace("lr = 0.01", 'lr = 1e30\noptimizer = "adam"\nwarmup_updates = 0'))
    done = transduce(*command(folder, "diverged", "--quiet", recipes=("base", "bad", "wide")))
    assert done.code == 1 and "bad" not in done.out.split("failed:")[0], done.err
    assert "not finite" in done.out.split("failed:")[1] and "wide" in done.out


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forkserver")
def test_kills_change_nothing_and_finished_trainings_are_not_repeated(
    folder: Path, processes: ForkServerContext
) -> None:
    """SIGKILL in the first training, in the second, between them, and while the results are collected."""
    errors = folder / "errors"

    def process(name: str) -> ForkServerProcess:
        arguments = [*map(str, command(folder, name))]
        return processes.Process(target=kills.child, args=(arguments, str(errors)))

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
