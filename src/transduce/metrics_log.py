"""Metrics for programs: `metrics.jsonl`, one JSON object per line, and experiment trackers.

A tracker gets the numbers of every event as `EVENT/NAME` at the event's update, and the settings of the run. It writes
into the run folder; nothing is sent to another machine unless environment variables of the tracker request it.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transduce.errors import SettingsError, cannot_write, message_of
from transduce.runs.atomic import reading, sync, write_text
from transduce.runs.manifest import settings_by_name

if TYPE_CHECKING:
    from transduce.runs.folder import RunFolder

_SECONDS = 15  # timeout for a tracker's server; a tracker is dropped after two or three failures


class MetricsFile:
    """A file of events such as `metrics.jsonl`: one JSON object per line, each flushed when it is written.

    Numbers that are not finite become null, so that any JSON reader can read every line. `active`: whether this process
    reads and writes the file, which only the main process does; otherwise all methods do nothing.
    """

    def __init__(self, path: Path, *, active: bool = True) -> None:
        self.path, self.active = Path(path), active

    def append(self, event: Mapping[str, Any]) -> None:
        """Write an event as one line; raise `RunFolderError` if the disk is full."""
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
        """Return all events, without damaged or incomplete lines; an empty list if there is no file."""
        return [event for _, event in self._lines() if event is not None]

    def truncate_after(self, update: int, *, validated: bool = True) -> list[str]:
        """Remove damaged lines, and events after `update`, which a resumed run repeats; return a note per damaged line.

        `validated`: False if the validation at `update` will be repeated too. Events of restarts are never removed.
        """
        if not self.active:
            return []
        lines, last = list(self._lines()), {"validation": update if validated else update - 1}
        events = [event for _, event in lines if event is not None]
        kept = [e for e in events if e["event"] == "restart" or e.get("update", 0) <= last.get(e["event"], update)]
        write_text(self.path, "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in kept))
        return [f"{self.path}, line {number}: damaged, left out" for number, event in lines if event is None]

    def _lines(self) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Yield number and event of each line, None for a damaged line. An incomplete last line is left out."""
        if self.active and self.path.exists():
            with reading(self.path), self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.endswith(b"\n"):
                        yield number, _parse(line)


def end_of(events: Iterable[Mapping[str, Any]], *, n_continuations: int) -> Mapping[str, Any] | None:
    """Return the event that ended a training after its last continuation, or None if it has not ended since."""
    ends = (event for event in events if event["event"] == "end" and type(event.get("best_update")) is int)
    return next((event for event in ends if event.get("continuations", 0) == n_continuations), None)


class Tracker(NamedTuple):
    """The functions of an experiment tracker for one run.

    log: sends numbers of an update. close: writes pending data.
    """

    log: Callable[[Mapping[str, float], int], object]
    close: Callable[[], object]


def _tensorboard(folder: Path, name: str, settings: Mapping[str, Any]) -> Tracker:
    """Open a writer of event files in `tensorboard/`."""
    from torch.utils.tensorboard.writer import SummaryWriter

    shutil.rmtree(folder / "tensorboard", ignore_errors=True)  # TensorBoard gets all events again
    writer = SummaryWriter(str(folder / "tensorboard"))
    writer.add_text("settings", "\n".join(f"    {key} = {value}" for key, value in settings.items()))

    def log(numbers: Mapping[str, float], update: int) -> None:
        for key, value in numbers.items():
            writer.add_scalar(key, value, update)

    return Tracker(log, writer.close)


def _wandb(folder: Path, name: str, settings: Mapping[str, Any]) -> Tracker:
    """Open an offline run in `wandb/`, which `wandb sync` uploads; WANDB_MODE=online uploads it at once."""
    os.environ.setdefault("WANDB_INIT_TIMEOUT", str(_SECONDS))
    import wandb

    mode: Any = os.environ.get("WANDB_MODE", "offline")
    run = wandb.init(project="transduce", name=name, dir=folder, config=dict(settings), mode=mode)
    return Tracker(lambda numbers, update: run.log({"update": update, **numbers}), run.finish)


def _mlflow(folder: Path, name: str, settings: Mapping[str, Any]) -> Tracker:
    """Open a run in the file store `mlruns/`, or on the server that MLFLOW_TRACKING_URI names."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions prefer databases
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_SECONDS))
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    uri = os.environ.get("MLFLOW_TRACKING_URI", (folder / "mlruns").absolute().as_uri())
    client = MlflowClient(uri)
    known = client.get_experiment_by_name("transduce")
    experiment = client.create_experiment("transduce") if known is None else known.experiment_id
    run = client.create_run(experiment, run_name=name).info.run_id
    params = [Param(key, str(value)[:500]) for key, value in settings.items()]
    for start in range(0, len(params), 100):  # the largest number of parameters in a request
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
"""Functions that open a tracker. Arguments: the run folder, a name, and the settings by dotted name."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise `SettingsError` for a tracker that is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise SettingsError(f"training.track: {name} is not installed: pip install 'transduce[{name}]'")


def numbers_of(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of an event as `EVENT/NAME`.

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
    """The metrics of a run, also sent to the trackers of `training.track`.

    A process that resumes opens a new run of the tracker, with all events so far.
    """

    def __init__(self, folder: RunFolder, *, active: bool, warn: Callable[[str], object]) -> None:
        super().__init__(folder.path / "metrics.jsonl", active=active)
        self._folder, self._warn, self._trackers = folder, warn, dict[str, Tracker]()
        self._names = list[str](dict.fromkeys(folder.settings.training.track)) if active else []

    def append(self, event: Mapping[str, Any]) -> None:
        super().append(event)
        events: Sequence[Mapping[str, Any]] = [event]
        if self._names and not self._trackers:
            events = self.read()
            for name in list(self._names):
                with self._dropping(name):
                    run, settings = self._folder, dict(settings_by_name(self._folder.settings))
                    title = run.settings.name or run.path.absolute().name
                    self._trackers[name] = TRACKERS[name](run.path, title, settings)
            atexit.register(self.close)  # after an interrupt too
        for name, tracker in list(self._trackers.items()):
            with self._dropping(name):
                for missing in events:
                    tracker.log(numbers_of(missing), missing.get("update", 0))
        if event["event"] == "end":
            self.close()

    def close(self) -> None:
        """Close the trackers, so that they write pending data."""
        for name, tracker in list(self._trackers.items()):
            with self._dropping(name):
                tracker.close()
        self._trackers = {}

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """Context manager: if a tracker fails, warn and continue without it."""
        try:
            yield
        except Exception as error:  # each tracker has its own exceptions
            self._names.remove(name)
            self._trackers.pop(name, None)
            self._warn(f"training.track: {name} failed and gets nothing more: {message_of(error)}")


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the event in a line of JSON; None if the line is damaged."""
    try:
        event = json.loads(line)
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
