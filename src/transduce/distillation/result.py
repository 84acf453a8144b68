"""Teacher, student and baseline side by side: BLEU with significance, speed, parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transduce.config.settings import Settings
from transduce.data.preparation import read_scored_pairs
from transduce.evaluation.scored_models import ScoredTranslator
from transduce.evaluation.significance import SystemComparison
from transduce.evaluation.speed import measure_in_turns
from transduce.logging import Log
from transduce.runs.folder import RunFolder
from transduce.runs.tensor_file import shapes
from transduce.tasks.registry import find_task

TIMED = 1000  # sentences translated per round


@dataclass(frozen=True, slots=True)
class DistilledSystem:
    """One model.

    `sentences_per_second`: median of the rounds. `notes`: see `EngineChoice.notes`.
    """

    run: str
    n_parameters: int
    sentences_per_second: float
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class DistillationResult:
    """Systems by role (teacher, student, baseline). `comparisons`: by test set, of the student with each other one."""

    systems: Mapping[str, DistilledSystem]
    comparisons: Mapping[str, Mapping[str, SystemComparison]]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        comparisons = {
            name: {role: one.to_json() for role, one in found.items()} for name, found in self.comparisons.items()
        }
        return asdict(self) | {"comparisons": comparisons}

    def lines(self) -> list[str]:
        """Format for people."""
        speed, lines, signature = self.systems["teacher"].sentences_per_second, [], ""
        for role, one in self.systems.items():
            lines.append(
                f"{role:<8}  {one.n_parameters:>12,} parameters  {one.sentences_per_second:8,.1f} sentences/s "
                f"({one.sentences_per_second / speed:.2f} times the teacher)  {one.run}"
            )
            lines += [f"note on the {role}: {note}" for note in one.notes]
        for name, found in self.comparisons.items():
            for role, compared in found.items():
                lines.append(f"{name}, student against {role}: {compared.line()}")
                signature = compared.signature
        return [*lines, f"BLEU by {signature}; intervals of 95 % and p by paired bootstrap"]


def compare_models(runs: Mapping[str, Path], settings: Settings, log: Log) -> DistillationResult:
    """Translate the test sets of `settings` with the runs, by role, and compare the student with the others.

    Each uses its own decoding settings. BLEU is that of `settings.evaluation`.
    """
    sets = read_scored_pairs(find_task("translation").sources(settings))
    models = {role: ScoredTranslator(RunFolder.open(run), sets, settings) for role, run in runs.items()}
    speeds = measure_in_turns({role: model.run_again for role, model in models.items()}, TIMED, log)
    outputs = {role: {one.name: one for one in model.outputs()} for role, model in models.items()}
    student = outputs.pop("student")
    comparisons = {
        name: {role: SystemComparison.of(student[name], found[name]) for role, found in outputs.items()}
        for name in sets
    }
    systems = {
        role: DistilledSystem(
            run=str(run),
            n_parameters=sum(map(math.prod, shapes(run / "model.safetensors").values())),
            sentences_per_second=speeds[role],
            notes=models[role].translator.choice.notes(),
        )
        for role, run in runs.items()
    }
    return DistillationResult(systems, comparisons)
