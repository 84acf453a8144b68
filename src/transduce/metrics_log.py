"""Metrics for programs: `metrics.jsonl`, one JSON object per line, and experiment trackers that get the same.

A tracker gets the numbers of every event as `EVENT/NAME` at the event's update, and the settings of the run. It writes
into the run folder; nothing is sent to another machine unless the tracker's own environment variables ask for it.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transduce.errors import SettingsError, cannot_write, message_of
from transduce.runs.atomic import reading, sync, write_text
from transduce.runs.identity import settings_by_name

if TYPE_CHECKING:
    from transduce.runs.folder import RunFolder

_LONGEST_LINE = 1 << 20  # bytes; parsing takes up to 20 times as much memory
_SECONDS = 15  # that a training waits for the server of a tracker, which is dropped after two or three such times


class MetricsFile:
    """`metrics.jsonl`: one JSON object per line, each flushed when it is written.

    Numbers that are not finite become null, so that any JSON reader can read every line. `active` false, for worker
    ranks: nothing is read or written; the main process does that.
    """

    def __init__(self, path: Path, *, active: bool = True) -> None:
        self.path, self.active = Path(path), active

    def append(self, event: Mapping[str, Any]) -> None:
        """Write one line; a full disk is a `RunFolderError`."""
        if not self.active:
            return
        line = json.dumps(_finite(event), ensure_ascii=False, allow_nan=False)
        try:
            with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line + "\n")
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def sync(self) -> None:
        """Make the system write the lines to the disk."""
        if self.active and self.path.exists():
            sync(self.path)

    def read(self) -> list[dict[str, Any]]:
        """All events, without damaged lines and a last one that a kill cut short; none if there is no file."""
        return self._read()[0]

    def truncate_after(self, update: int, *, validated: bool = True) -> list[str]:
        """Remove events after `update`, so that a resumed run repeats no line, and damaged lines.

        `validated` false: also a validation of `update`, which will be repeated. All restarts are kept. Returns a note
        for each damaged line.
        """
        if not self.active:
            return []
        events, damaged = self._read()
        last = {"validation": update if validated else update - 1}
        kept = [e for e in events if e["event"] == "restart" or e.get("update", 0) <= last.get(e["event"], update)]
        write_text(self.path, "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in kept))
        return [f"{self.path}, line {number}: damaged, left out" for number in damaged]

    def _read(self) -> tuple[list[dict[str, Any]], list[int]]:
        """The events, and the numbers of damaged lines."""
        events: list[dict[str, Any]] = []
        damaged = []
        if not self.active or not self.path.exists():
            return [], []
        with reading(self.path), self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # a kill cut it short
                if (event := _parse(line)) is None:
                    damaged.append(number)
                else:
                    events.append(event)
        return events, damaged


class Tracker(NamedTuple):
    """Takes the numbers of the events of one run, with their updates; `close` writes what is left."""

    log: Callable[[Mapping[str, float], int], object]
    close: Callable[[], object]


def _tensorboard(folder: Path, name: str, settings: Mapping[str, Any]) -> Tracker:
    """Event files in `tensorboard/`."""
    from torch.utils.tensorboard.writer import SummaryWriter

    shutil.rmtree(folder / "tensorboard", ignore_errors=True)  # it gets all events again
    writer = SummaryWriter(str(folder / "tensorboard"))
    writer.add_text("settings", "\n".join(f"    {key} = {value}" for key, value in settings.items()))

    def log(numbers: Mapping[str, float], update: int) -> None:
        for key, value in numbers.items():
            writer.add_scalar(key, value, update)

    return Tracker(log, writer.close)


def _wandb(folder: Path, name: str, settings: Mapping[str, Any]) -> Tracker:
    """Offline runs in `wandb/`, which `wandb sync` uploads; WANDB_MODE=online uploads them at once."""
    os.environ.setdefault("WANDB_INIT_TIMEOUT", str(_SECONDS))
    import wandb

    mode: Any = os.environ.get("WANDB_MODE", "offline")
    run = wandb.init(project="transduce", name=name, dir=folder, config=dict(settings), mode=mode)
    return Tracker(lambda numbers, update: run.log({"update": update, **numbers}), run.finish)


def _mlflow(folder: Path, name: str, settings: Mapping[str, Any]) -> Tracker:
    """A file store in `mlruns/`; MLFLOW_TRACKING_URI names a server."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions prefer databases
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_SECONDS))
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    uri = os.environ.get("MLFLOW_TRACKING_URI", (folder / "mlruns").absolute().as_uri())
    client = MlflowClient(uri)
    found = client.get_experiment_by_name("transduce")
    experiment = client.create_experiment("transduce") if found is None else found.experiment_id
    run = client.create_run(experiment, run_name=name).info.run_id
    params = [Param(key, str(value)[:500]) for key, value in settings.items()]
    for start in range(0, len(params), 100):  # the most that a request may have
        client.log_batch(run, params=params[start : start + 100])

    def log(numbers: Mapping[str, float], update: int) -> None:
        now = int(1000 * time.time())
        client.log_batch(run, [Metric(key, value, now, update) for key, value in numbers.items()])

    return Tracker(log, lambda: client.set_terminated(run))


TRACKERS: dict[str, Callable[[Path, str, Mapping[str, Any]], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
"""Functions that open a tracker: for a run folder, in which it writes, a name, and the settings by dotted name."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise `SettingsError` for a tracker that is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise SettingsError(f"training.track: {name} is not installed: pip install 'transduce[{name}]'")


def numbers_of(event: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of an event.

    >>> numbers_of({"event": "validation", "update": 7, "loss": 2.5, "best": True, "grad_norm": math.nan})
    {'validation/loss': 2.5, 'validation/best': 1.0}
    """
    kind = event["event"]
    return {
        f"{kind}/{key}": float(value)
        for key, value in event.items()
        if key != "update" and isinstance(value, int | float) and math.isfinite(value)
    }


class TrackedMetrics(MetricsFile):
    """The metrics of a run, which `training.track` gets too.

    A process that resumes begins another run of the tracker, with all events so far.
    """

    def __init__(self, folder: RunFolder, *, active: bool, warn: Callable[[str], object]) -> None:
        super().__init__(folder.path / "metrics.jsonl", active=active)
        self._folder, self._warn, self._trackers = folder, warn, dict[str, Tracker]()
        self._names = list[str](dict.fromkeys(folder.settings.training.track)) if active else []

    def append(self, event: Mapping[str, Any]) -> None:
        """Write one line; a full disk is a `RunFolderError`."""
        super().append(event)
        events: Sequence[Mapping[str, Any]] = [event]
        if self._names and not self._trackers:
            events = self.read()
            for name in list(self._names):
                with self._dropping(name):
                    self._trackers[name] = self._begin(name)
            atexit.register(self.close)  # after an interrupt too
        for name, tracker in list(self._trackers.items()):
            with self._dropping(name):
                for one in events:
                    tracker.log(numbers_of(one), one.get("update", 0))
        if event["event"] == "end":
            self.close()

    def close(self) -> None:
        """Complete what the trackers write."""
        for name, tracker in list(self._trackers.items()):
            with self._dropping(name):
                tracker.close()
        self._trackers = {}

    def _begin(self, name: str) -> Tracker:
        run, settings = self._folder, dict(settings_by_name(self._folder.settings))
        return TRACKERS[name](run.path, run.settings.name or run.path.absolute().name, settings)

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """Inside, an error of a tracker ends that tracker, with a warning: the training and its metrics continue."""
        try:
            yield
        except Exception as error:  # each of the libraries has its own
            self._names.remove(name)
            self._trackers.pop(name, None)
            self._warn(f"training.track: {name} failed and gets nothing more: {message_of(error)}")


def _parse(line: bytes) -> dict[str, Any] | None:
    """The event in a line; None if it is damaged."""
    try:
        event = json.loads(line) if len(line) <= _LONGEST_LINE else None
    except (ValueError, RecursionError):  # not UTF-8, or not JSON
        return None
    if isinstance(event, dict) and isinstance(event.get("event"), str) and type(event.get("update", 0)) is int:
        return event
    return None


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
