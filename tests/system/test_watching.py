"""Trackers get what metrics.jsonl contains, and the report of a running training."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from system.commands import small, succeed, transduce, write_corpus
from transduce.errors import SettingsError
from transduce.metrics_log import TRACKERS, MetricsFile, TrackedMetrics, Tracker, check_trackers, numbers_of
from transduce.runs.folder import RunFolder


def train(folder: Path, run: Path, *overrides: str) -> list[object]:
    src, tgt = write_corpus(folder, "a", 200)
    return ["train", "--src", src, "--tgt", tgt, "--run", run, *small("training.valid_updates=10", *overrides)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 updates."""
    folder = tmp_path_factory.mktemp("trained")
    succeed(*train(folder, folder / "run", "training.max_updates=20"))
    return folder / "run"


def tracked(trained: Path, folder: Path, name: str) -> list[dict[str, Any]]:
    """Send the events of a run to a tracker, in two processes' worth: the second begins in the middle."""
    events = MetricsFile(trained / "metrics.jsonl").read()
    settings = RunFolder.open(trained).settings.with_values("training", track=[name])
    with RunFolder.create(folder / "run", settings, "") as run:
        for some in (events[:2], events[2:]):
            metrics = TrackedMetrics(run, active=True, warn=print)
            for event in some:
                metrics.append(event)
            metrics.close()
    return events


def test_a_tracker_that_fails_is_dropped(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a training it must not be what ends it."""

    updates = list[int]()

    def log(numbers: Mapping[str, float], update: int) -> None:
        updates.append(update)
        if len(updates) > 2:
            raise RuntimeError("no\nconnection")

    def close() -> None:
        raise AssertionError("closed after it was dropped")

    monkeypatch.setitem(TRACKERS, "wandb", lambda *_: Tracker(log, close))
    warnings = list[str]()
    settings = RunFolder.open(trained).settings.with_values("training", track=["wandb"])
    events = MetricsFile(trained / "metrics.jsonl").read()
    with RunFolder.create(tmp_path / "run", settings, "") as run:
        metrics = TrackedMetrics(run, active=True, warn=warnings.append)
        for event in events:
            metrics.append(event)
        metrics.close()
    assert warnings == ["training.track: wandb failed and gets nothing more: no connection"]
    assert len(MetricsFile(tmp_path / "run" / "metrics.jsonl").read()) == len(events) and len(updates) == 3


def expected(events: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for event in events:
        for key, value in numbers_of(event).items():
            found.setdefault(key, []).append((event["update"], value))
    return found


def test_tensorboard(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    wanted = expected(tracked(trained, tmp_path, "tensorboard"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert set(read.Tags()["scalars"]) == wanted.keys()
    for key, points in wanted.items():
        assert [(e.step, e.value) for e in read.Scalars(key)] == [(n, pytest.approx(v, rel=1e-6)) for n, v in points]


@pytest.mark.loopback  # urllib3 binds a socket to find out whether there is IPv6
def test_mlflow(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    wanted = expected(tracked(trained, tmp_path, "mlflow"))
    from mlflow.tracking import MlflowClient

    client = MlflowClient((tmp_path / "run" / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("transduce")
    last = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])[0]
    assert last.data.params["training.seed"] == "1" and last.info.status == "FINISHED"
    assert last.data.metrics.keys() == wanted.keys()
    for key, points in wanted.items():
        assert [(m.step, m.value) for m in client.get_metric_history(last.info.run_id, key)] == points


def test_wandb(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    sent: list[dict[str, float]] = []
    import wandb

    log = wandb.Run.log
    monkeypatch.setattr(wandb.Run, "log", lambda run, data: (sent.append(data), log(run, data))[1])
    events = tracked(trained, tmp_path, "wandb")
    wanted = [{"update": event["update"], **numbers_of(event)} for event in events]
    assert sent[-len(wanted) :] == wanted
    files = list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and all(file.stat().st_size for file in files)


def test_a_tracker_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transduce.metrics_log.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"wandb is not installed: pip install 'transduce\[wandb\]'"):
        check_trackers(["wandb"])


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    done = transduce(*train(tmp_path, tmp_path / "run", 'training.track=["tensorbord"]'))
    assert done.code == 2 and "training.track" in done.err and "tensorboard" in done.err


@pytest.mark.slow
def test_the_report_of_a_running_training(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "transduce", *train(tmp_path, run, "training.max_updates=100000"), "--quiet"]
    process = subprocess.Popen([*map(str, command)], env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        until = time.monotonic() + 100
        while not any(event["event"] == "validation" for event in MetricsFile(run / "metrics.jsonl").read()):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        succeed("report", run)
        assert "Validation scores" in (run / "report.html").read_text()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
