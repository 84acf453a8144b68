"""What docs/trust.md promises: kills, clocks, two fresh runs, full disks, folders of early versions, `verify`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kills
import transduce
from system.commands import SMALL, write_corpus
from system.commands import transduce as command
from transduce.config import Settings
from transduce.decoding.translator import Translator
from transduce.logging import Log
from transduce.pipeline import train
from transduce.runs.folder import RunFolder
from transduce.runs.format_version import upgraded
from transduce.runs.verify import verify_files

KEPT = Path(__file__).parents[1] / "kept"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(transduce.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def early(tmp_path: Path) -> Path:
    """A copy of the folder that version 0.1.0 left when it was stopped after update 333 of 400."""
    shutil.copytree(KEPT / "0.1.0-letters", tmp_path / "letters")
    return tmp_path / "letters"


def test_an_early_folder_translates_as_it_did(early: Path) -> None:
    told = Translator.load(early).translate(["a b c", "h", "d d e f g", "b a"])
    assert [translation.text for translation in told] == ["A B C", "H", "D D E F G", "B A"]
    assert [translation.score for translation in told] == pytest.approx([-0.1028, -0.0758, -0.2223, -0.0915], abs=1e-3)


def test_an_early_folder_trains_on_to_its_end(early: Path) -> None:
    asked = json.loads((early / "manifest.json").read_text())["asked"]
    train(Settings.from_mapping(upgraded(asked, 1)), early, log=Log(quiet=True))
    told = {event["update"]: event for event in events(early) if event["event"] == "update"}
    assert sorted(told) == list(range(10, 410, 10))
    # what 0.1.0 itself came to, uninterrupted; on another machine up to rounding
    assert told[390]["loss"] == pytest.approx(0.8722, rel=0.02)
    assert told[400]["loss"] == pytest.approx(0.8964, rel=0.02)
    assert [event["update"] for event in events(early) if event["event"] == "restart"] == [333]
    assert all(not found.wrong for found in verify_files(early))


def test_two_fresh_runs_are_the_same_whatever_the_clock_says(tmp_path: Path) -> None:
    """Two processes; in the second, `time.time` jumps by years at every look."""
    src, tgt = write_corpus(tmp_path, "train", 120)
    (tmp_path / "sitecustomize.py").write_text(
        "import itertools, time\n_real, _n = time.time, itertools.count()\n"
        "time.time = lambda: _real() + (-1) ** next(_n) * 3e8\n"
    )
    sets = [
        part for value in (*SMALL, "tokenizer.sampling=0.2", "training.max_updates=30") for part in ("--set", value)
    ]
    for name, path in (("plain", ""), ("jumping", f"{tmp_path}{os.pathsep}")):
        environment = {**ENVIRONMENT, "PYTHONPATH": path + ENVIRONMENT["PYTHONPATH"]}
        arguments = ["train", "--src", src, "--tgt", tgt, "--run", tmp_path / name, "--quiet", *sets]
        subprocess.run([sys.executable, "-m", "transduce", *map(str, arguments)], check=True, env=environment)
    assert kills.computed(tmp_path / "plain") == kills.computed(tmp_path / "jumping")
    one, other = (tmp_path / name / "model.safetensors" for name in ("plain", "jumping"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="small disks and a server of processes are Linux's here")
def test_kills_at_random_instants_change_nothing(tmp_path: Path) -> None:
    """The short form of `python tests/kills.py`."""
    folder = tmp_path / "disk"
    with kills.small_disk(folder, kills.FREE_ON_DISK):
        tally = kills.campaign(folder, kills=10, seed=int.from_bytes(os.urandom(4)))
    assert tally.faults == [], tally.lines()


def test_every_damaged_file_is_named(early: Path) -> None:
    for name in ("config.json", "tokenizer.model", "model.safetensors", "checkpoints/u00000333/training.safetensors"):
        whole = (early / name).read_bytes()
        (early / name).write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        done = command("verify", early, "--files")
        assert done.code == 1
        assert [line.split()[1] for line in done.out.splitlines() if line.startswith("DAMAGED")] == [f"{name}:"]
        (early / name).write_bytes(whole)
    assert command("verify", early, "--files").code == 0


def test_a_damaged_record_is_named_on_load(tmp_path: Path) -> None:
    settings = Settings.from_mapping({"data": {"demo": 50}})
    with RunFolder.create(tmp_path / "run", settings, "") as run:
        run.write_record("scores.json", {"sets": [1]})
        run.write_record("scores.json", {"sets": [2]})
        assert run.read_record("scores.json") == {"sets": [2]}
        assert run.read_record("samples.json") == {}
        (tmp_path / "run" / "scores.json").write_text('{"sets": [3]}')
        with pytest.raises(transduce.errors.RunFolderError, match=r"scores\.json is damaged"):
            run.read_record("scores.json")


def test_files_of_a_recipe_are_none(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("")
    told = command("verify", tmp_path / "recipe.toml", "--files")
    assert told.code == 2 and "--files looks at a run folder" in told.err


def test_verify_kills_and_compares_and_leaves_the_run_alone(tmp_path: Path) -> None:
    src, tgt = write_corpus(tmp_path, "train", 100)
    sets = "\n".join(f"{value.replace('model.', '', 1)}" for value in SMALL if value.startswith("model."))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[data]\ntrain = [{{ src = "{src.name}", tgt = "{tgt.name}" }}]\n[model]\n{sets}\n'
        "[tokenizer]\nvocab_size = 200\n[training]\nbatch_tokens = 512\nprecision = 'float32'\n"
    )
    before = sorted(path.name for path in tmp_path.iterdir())
    command_line = [sys.executable, "-m", "transduce", "verify", str(recipe), "--updates", "30", "--kills", "2"]
    done = subprocess.run(command_line, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert "comes to the same end" in done.stdout
    assert "killed with SIGKILL" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_verify_does_so_with_a_run_of_another_task_whose_settings_were_chosen(tmp_path: Path) -> None:
    lines = [f"{i % 2}\tthe {'cat' if i % 2 else 'dog'} of house {i % 7}" for i in range(40)]
    (tmp_path / "labels.tsv").write_text("\n".join(lines) + "\n")
    asked = {
        "task": "classification",
        "data": {"train": [{"path": str(tmp_path / "labels.tsv")}]},
        "model": {"d_model": 16, "d_ff": 16, "n_heads": 2, "n_encoder_layers": 1},
        "tokenizer": {"vocab_size": 60},
        "training": {"max_updates": 2},
    }
    run = train(Settings.from_mapping(asked), tmp_path / "run", log=Log(quiet=True))
    command_line = [sys.executable, "-m", "transduce", "verify", str(run), "--updates", "20", "--kills", "1"]
    done = subprocess.run(command_line, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert "comes to the same end" in done.stdout
