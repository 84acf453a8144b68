"""`transduce doctor`: ready, or a line for each obstacle and exit code 2. It leaves no files behind."""

import contextlib
import io
import json
import os
import subprocess
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

import transduce as package
from system.commands import sets, small, transduce, write_corpus
from transduce.config.settings import Settings
from transduce.demo.corpus import demo_pairs
from transduce.doctor import diagnose, resources


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setitem(diagnose.diagnose.__kwdefaults__, "seconds", 0.2)


@pytest.fixture
def trial_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the start of a process; another test measures in one."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        folder, seconds, n_processes = command[-3:]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            resources.rehearse(Path(folder), float(seconds), int(n_processes))
        return subprocess.CompletedProcess(command, 0, out.getvalue().encode(), b"")

    monkeypatch.setattr(resources, "subprocess", mock.Mock(wraps=subprocess, run=run))


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.chdir(tmp_path)
    return write_corpus(tmp_path, "train", 400)


def test_ready_in_text_and_in_json(corpus: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src, tgt = corpus
    before = sorted(os.listdir(tmp_path))
    command = ["doctor", "--src", src, "--tgt", tgt, "--run", "runs/x", *small()]
    diagnosed = cache(diagnose.diagnose)  # one trial for both
    monkeypatch.setattr(diagnose, "diagnose", lambda asked, **_: diagnosed(asked))
    done = transduce(*command)
    assert (done.code, done.err.count("error")) == (0, 0), done
    assert done.out.splitlines()[-1] == "ready" and "data      train.en + train.de: 400" in done.out
    for name in ("memory", "speed", "time", "machine"):
        assert f"\n{name}" in done.out, name
    assert sorted(os.listdir(tmp_path)) == before

    done = transduce(*command, "--json")
    found = json.loads(done.out)
    assert done.out.count("\n") == 1 and found["ready"] and not done.err
    assert found["corpora"] == {"train.en + train.de": 400}
    assert found["trial"]["peak"] > 50 << 20 and found["trial"]["updates"] > 0
    assert found["time"]["updates"] == 4 and found["time"]["by"] == "max_updates"


def test_obstacles_are_printed_and_exit_code_is_2(corpus: tuple[Path, Path]) -> None:
    src, tgt = corpus
    lines = tgt.read_text(encoding="utf-8").splitlines()
    tgt.write_text("\n".join(lines[1:]) + "\n", encoding="utf-8")
    done = transduce("doctor", "--src", src, "--tgt", tgt, "--run", "runs/x", *small("training.precision=float32"))
    assert done.code == 2
    obstacles = [line for line in done.out.splitlines() if line.startswith("obstacle: ")]
    assert any("has 400 lines" in line and "399" in line for line in obstacles)
    assert any("shifted by 1 line from the beginning" in line for line in obstacles)
    assert done.out.splitlines()[-1] == f"not ready: {len(obstacles)} obstacles" and "\nmemory" not in done.out


def test_obstacles_in_python(corpus: tuple[Path, Path]) -> None:
    src, _ = corpus
    asked = Settings.from_mapping({"data": {"train": [{"src": str(src), "tgt": str(src)}]}})
    diagnosis = package.diagnose(asked)
    assert not diagnosis.ready and diagnosis.obstacles[0].check == "copies"


@pytest.mark.usefixtures("trial_in_this_process")
@pytest.mark.parametrize("task", ["causal", "masked", "classification"])
def test_every_task(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [pair.src for pair in demo_pairs("train", 400, seed=1)]
    rows = [f"{'ab'[i % 2]}\t{line}" for i, line in enumerate(lines)] if task == "classification" else lines
    path = tmp_path / "text.tsv"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    layers = "n_decoder_layers" if task == "causal" else "n_encoder_layers"
    values = {
        "task": task,
        "data": {"train": [{"path": str(path)}], **({} if task == "classification" else {"context": 32})},
        "model": {"d_model": 32, "d_ff": 64, "n_heads": 2, layers: 1},
        "tokenizer": {"vocab_size": 300},
        "training": {"batch_tokens": 512, "max_updates": 4, "precision": "float32"},
    }
    found = package.diagnose(Settings.from_mapping(values))
    assert found.ready, found.obstacles
    assert found.trial is not None and found.trial.peak is not None and found.trial.seconds_per_update is not None
    assert found.time is not None and found.time.updates == 4


@pytest.mark.usefixtures("trial_in_this_process")
def test_fine_tuning_and_processes(corpus: tuple[Path, Path]) -> None:
    src, tgt = corpus
    given = ("--src", src, "--tgt", tgt, "--quiet")
    assert transduce("train", *given, "--run", "runs/x", *small()).code == 0
    sizes = ("training.batch_tokens=1024", "training.max_updates=2", "training.precision=float32")
    options = (*given, "--from", "runs/x", "--run", "runs/y", "--extend-vocabulary", "20")
    found = json.loads(transduce("doctor", *options, *sets(*sizes), "--json", "--processes", "2").out)
    assert found["ready"] and found["settings"]["tokenizer"]["extend"] == 20
    assert found["trial"]["updates"] > 0


@pytest.mark.usefixtures("trial_in_this_process")
def test_too_little_memory_is_an_obstacle(corpus: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial takes more than the machine reports as free."""
    from transduce import machine

    monkeypatch.setattr(machine, "_free_memory", lambda: 64 << 20)
    src, tgt = corpus
    done = transduce("doctor", "--src", src, "--tgt", tgt, "--run", "runs/x", *small("training.device=cpu"))
    assert done.code == 2 and "of the 64 MiB free" in done.out and "obstacle: an update with" in done.out


def test_every_training_runs_the_quick_checks(corpus: tuple[Path, Path], tmp_path: Path) -> None:
    src, tgt = corpus
    lines = tgt.read_text(encoding="utf-8").splitlines()
    shifted = tmp_path / "shifted.de"
    shifted.write_text("\n".join([*lines[1:], lines[0]]) + "\n", encoding="utf-8")
    options = ("--run", "runs/x", "--dry-run", *small())
    done = transduce("train", "--src", src, "--tgt", shifted, *options)
    assert done.code == 0
    assert "warning: train.en + shifted.de: the sides are shifted by 1 line from the beginning" in done.err
    assert "warning" not in transduce("train", "--src", src, "--tgt", tgt, *options).err


def test_bad_settings_are_obstacles(corpus: tuple[Path, Path]) -> None:
    src, tgt = corpus
    done = transduce(
        "doctor", "--src", src, "--tgt", tgt, "--set", "training.optimizer=adem", "--set", "model.n_heads=3"
    )
    assert done.code == 2 and "obstacle: model.d_model = 128 is not divisible by model.n_heads = 3" in done.out
    missing = transduce("doctor", "--src", "no.en", "--tgt", tgt)
    assert missing.code == 2 and "there is no file" in missing.err
