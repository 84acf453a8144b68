"""Measurements of each run: its cost, from the log of the training, and its scores on the test sets."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transduce.evaluation.result_files import read_record
from transduce.evaluation.significance import Outputs
from transduce.runs.atomic import expecting
from transduce.runs.folder import RunFolder
from transduce.training.averaging import AVERAGES

SCORES_FILE = "comparison.json"
CURVES = {"nll": "validation loss, nats per token", "bleu": "validation BLEU", "accuracy": "validation accuracy"}
"""Scores of validations that are drawn against time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasures:
    """One finished training.

    `seconds`: of training, with its validations. `nll`: validation loss of the kept weights without label smoothing,
    in nats per target token. `tokens_per_second`: None if the training was too short to log it. `curves`: by key of
    CURVES, by update: (minutes, score). `memory`: peak bytes.
    """

    n_parameters: int
    updates: int
    seconds: float
    tokens_per_second: float | None
    memory: int | None
    nll: float
    curves: Mapping[str, Mapping[int, tuple[float, float]]]
    sets: tuple[Outputs, ...]

    @property
    def n_examples(self) -> dict[str, int]:
        """Of each set."""
        return {one.name: len(one.statistics) for one in self.sets}


def read_measures(run: Path) -> RunMeasures:
    """The measures of a run that was scored. Raises `RunFolderError` for a damaged file."""
    folder = RunFolder.open(run)
    record, stored = read_record(folder), folder.read_record(SCORES_FILE)
    with expecting(run / SCORES_FILE):
        sets = tuple(map(Outputs.from_json, stored["sets"]))
    with expecting(run / "metrics.jsonl"):
        validations, end = record.of("validation"), record.of("end")[-1]
        last = AVERAGES[folder.settings.training.average].keeps_last
        best = [one for one in validations if one["update"] == end["best_update"]]
        kept = (validations if last or not best else best)[-1]
        speeds = [speed for _, speed in record.points("update", "tokens_per_second")]
        return RunMeasures(
            n_parameters=int(record.n_parameters or 0),
            updates=int(end["update"]),
            seconds=float(end["seconds"]),
            tokens_per_second=statistics.median(speeds) if speeds else None,
            memory=end.get("memory"),
            nll=float(kept["nll"]),
            curves={key: _curve(validations, key) for key in CURVES if any(key in one for one in validations)},
            sets=sets,
        )


def _curve(validations: Sequence[Mapping[str, Any]], key: str) -> dict[int, tuple[float, float]]:
    found = [one for one in validations if isinstance(one.get(key), int | float)]
    return {one["update"]: (one["seconds"] / 60, float(one[key])) for one in found}


@dataclass(frozen=True, slots=True)
class Speeds:
    """Examples per second of each recipe's model.

    `models`: digests of the models; `unit`: what an example is, empty if nothing is measured; `engine`: the one that
    ran the models.
    """

    models: Mapping[str, str]
    unit: str = ""
    engine: str = ""
    per_second: Mapping[str, float] = field(default_factory=dict)
