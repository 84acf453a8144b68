"""Reports and rollbacks after a bad loss.

A rollback is as exact as a resume. Skipped batches are part of the state, and a run only rolls back to a regular
checkpoint: one that every run with these settings has at that update, even if it was interrupted. So a run that is
killed before, during or after a rollback ends with the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transduce.config import TrainingSettings
from transduce.runs.atomic import read_json, write_json
from transduce.runs.folder import RunFolder
from transduce.training.feed import Position
from transduce.training.loss_spikes import BEFORE, RECENT, SPIKE, BadLoss
from transduce.training.meter import LATENCY

ADVICE = "start another run with a lower training.lr, a longer warm-up, or training.precision=float32"
FILE = "bad_loss.json"


def is_regular(update: int, settings: TrainingSettings) -> bool:
    """Whether every run with these settings saves its state after this update."""
    every = (settings.valid_updates, settings.save_updates)
    return update == 0 or any(n is not None and update % n == 0 for n in every)


def worth_keeping(updates: Sequence[int], settings: TrainingSettings) -> set[int]:
    """The checkpoints among `updates` that a run may have to roll back to, besides the newest.

    A bad loss is read at most `LATENCY` updates late, and a spike is detected up to `RECENT` updates after that.
    One checkpoint must be older than both together.
    """
    if settings.on_bad_loss != "rollback" or not updates:
        return set()
    regular = sorted((update for update in updates if is_regular(update, settings)), reverse=True)
    safe = next((i for i, update in enumerate(regular) if update < max(updates) - LATENCY - RECENT), len(regular))
    return set(regular[: safe + 1])


def target_of(error: BadLoss, updates: Sequence[int], settings: TrainingSettings) -> int | None:
    """The newest checkpoint before the suspects, a regular one if there is any."""
    before = [update for update in updates if update < error.suspects[0].update]
    return max([u for u in before if is_regular(u, settings)] or before, default=None)


def event_of(error: BadLoss, *, target: int, number: int) -> dict[str, Any]:
    """The event for metrics.jsonl and the report."""
    last = error.suspects[-1]
    return {
        "event": "rollback",
        "update": target,
        "from": last.update,
        "reason": f"the loss {error.reason}",
        "loss": last.loss if math.isfinite(last.loss) else None,
        "skipped": [[one.epoch, one.batch] for one in error.suspects],
        "number": number,
    }


def write_report(folder: RunFolder, error: BadLoss, texts: Callable[[Position], Sequence[list[str]]]) -> Path:
    """Add the suspects to bad_loss.json, with the `texts` of their batches, replacing an entry for the same ones."""
    path, last = folder.path / FILE, error.suspects[-1]
    batches = [
        {"update": one.update, "loss": repr(one.loss), "epoch": one.epoch, "batch": one.batch}
        | {"sentences": list(texts(one.position))}
        for one in error.suspects
    ]
    numbers = {"loss": repr(last.loss), "usual_loss": repr(error.usual), "grad_norm": repr(error.grad_norm)}
    entry = {"update": last.update, "reason": error.reason, **numbers, "lr": error.lr, "batches": batches}
    known = read_json(path).get("losses", []) if path.exists() else []
    others = [one for one in known if (one["update"], one["batches"]) != (entry["update"], batches)]
    write_json(path, {"losses": [*others, entry]})
    return path


def describe(error: BadLoss) -> str:
    """Describe the loss in one line."""
    last, first = error.suspects[-1], error.suspects[0]
    numbers = f"loss {last.loss:.4g}, gradient norm {error.grad_norm:.4g}"
    if error.reason == SPIKE:
        since = f"since update {first.update}; mean of at most {BEFORE} updates before: {error.usual:.4g}"
        return f"loss spike at update {last.update} ({numbers}; {since})"
    return f"the loss {error.reason} at update {last.update} ({numbers})"


def missing_events(there: Sequence[Mapping[str, Any]], rollbacks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rollbacks of the state that metrics.jsonl lacks because a kill came between writing the two."""
    logged = {event.get("number") for event in there if event.get("event") == "rollback"}
    return [dict(event) for event in rollbacks if event["number"] not in logged]
