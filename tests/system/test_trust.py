"""The promises of docs/trust.md: kills, clocks, two fresh runs, full disks, `verify`."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kills
import marians
import transduce
from system.commands import assert_refused, small, write_corpus
from system.commands import transduce as command
from transduce import pipeline
from transduce.config.settings import Settings
from transduce.logging import Log
from transduce.machine import Machine
from transduce.pipeline import train
from transduce.runs.folder import RunFolder
from transduce.training.step import Updater

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(transduce.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def test_two_fresh_runs_are_equal_whatever_the_clock_says(tmp_path: Path) -> None:
    """Two processes; the second has the recipe of the first, and every call of its `time.time` jumps by years."""
    src, tgt = write_corpus(tmp_path, "train", 120)
    (tmp_path / "sitecustomize.py").write_text(
        "import itertools, time\n_real, _n = time.time, itertools.count()\n"
        "time.time = lambda: _real() + (-1) ** next(_n) * 3e8\n"
    )
    given = small("tokenizer.sampling=0.2", "training.max_updates=30")
    recipe = tmp_path / "plain" / "recipe.toml"
    for name, path, asked in (
        ("plain", "", ["--src", src, "--tgt", tgt, *given]),
        ("jumping", f"{tmp_path}{os.pathsep}", [recipe]),
    ):
        environment = {**ENVIRONMENT, "PYTHONPATH": path + ENVIRONMENT["PYTHONPATH"]}
        arguments = ["train", *asked, "--run", tmp_path / name, "--quiet"]
        subprocess.run([sys.executable, "-m", "transduce", *map(str, arguments)], check=True, env=environment)
    assert RunFolder.open(tmp_path / "plain").settings == RunFolder.open(tmp_path / "jumping").settings
    assert kills.computed(tmp_path / "plain") == kills.computed(tmp_path / "jumping")
    one, other = (tmp_path / name / "model.safetensors" for name in ("plain", "jumping"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="needs tmpfs and forkserver")
def test_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    """A short form of `python tests/kills.py`: each way to kill once."""
    folder = tmp_path / "disk"
    with kills.small_disk(folder, kills.FREE_ON_DISK):
        tally = kills.campaign(folder, kills=len(kills.WAYS), seed=int.from_bytes(os.urandom(4)))
    assert tally.faults == [], tally.lines()


def test_every_damaged_file_is_named(tmp_path: Path) -> None:
    """`tests/unit/runs/test_verify.py` has the other states of a file."""
    run = marians.make_run(tmp_path / "run")
    for name in ("config.json", "tokenizer.model", "model.safetensors"):
        whole = (run / name).read_bytes()
        (run / name).write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        done = command("verify", run)
        assert done.code == 1
        assert [line.split()[1] for line in done.out.splitlines() if line.startswith("DAMAGED")] == [f"{name}:"]
        (run / name).write_bytes(whole)
    (run / "notes.txt").write_text("mine")
    done = command("verify", run)
    assert done.code == 0 and "unchecked notes.txt" in done.out and "; 2 unchecked" in done.out


def test_a_damaged_record_is_named_when_it_is_read(tmp_path: Path) -> None:
    settings = Settings.from_mapping({"data": {"demo": 50}})
    with RunFolder.create(tmp_path / "run", settings, "") as run:
        run.write_record("scores.json", {"sets": [1]})
        run.write_record("scores.json", {"sets": [2]})
        assert run.read_record("scores.json") == {"sets": [2]}
        assert run.read_record("samples.json") == {}
        (tmp_path / "run" / "scores.json").write_text('{"sets": [3]}')
        with pytest.raises(transduce.errors.RunFolderError, match=r"scores\.json is damaged"):
            run.read_record("scores.json")


def test_verify_refuses_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("")
    assert_refused(command("verify", tmp_path / "recipe.toml"), "recipe.toml")


def test_a_resumed_run_keeps_the_precision_and_the_micro_batch_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are chosen for the machine, and another value of either gives other weights."""
    src, tgt = write_corpus(tmp_path, "train", 100)
    model = {"d_model": 16, "d_ff": 16, "n_heads": 2, "n_encoder_layers": 1, "n_decoder_layers": 1}
    asked = Settings.from_mapping(
        {
            "data": {"train": [{"src": str(src), "tgt": str(tgt)}]},
            "model": model,
            "tokenizer": {"vocab_size": 200},
            "training": {"max_updates": 2, "batch_tokens": 4096},
        }
    )
    used: list[tuple[Any, Any]] = []

    class Interrupted(Exception):
        pass

    def interrupted(updater: Updater, batches: Any, *rest: Any, **options: Any) -> Any:
        used.append((updater.precision, [batch.n_rows for batch in batches]))
        raise Interrupted

    monkeypatch.setattr(Updater, "update", interrupted)
    machines = [Machine("cpu", "test", 1, 2**35, "float32"), Machine("cpu", "test", 1, 2**22, "bfloat16")]
    for machine, folder in zip([*machines, machines[1]], ("run", "run", "other"), strict=True):
        monkeypatch.setattr(pipeline, "this_machine", lambda device, machine=machine: machine)
        with pytest.raises(Interrupted):
            train(asked, tmp_path / folder, log=Log(quiet=True))
    assert used[0] == used[1] != used[2]
    first, other = (RunFolder.open(tmp_path / name, model=False).settings.training for name in ("run", "other"))
    assert (first.precision, other.precision) == ("float32", "bfloat16")
    assert first.micro_batch_tokens != other.micro_batch_tokens
