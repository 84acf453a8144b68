"""Teacher, student and baseline side by side: BLEU with significance, speed, parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transduce.config.settings import Settings
from transduce.data.preparation import read_scored_pairs
from transduce.decoding.translator import Translator
from transduce.demo.sources import translation_sources
from transduce.evaluation.evaluate import SystemComparison, compare_translations
from transduce.evaluation.speed import measure_in_turns
from transduce.logging import Log
from transduce.runs.tensor_file import shapes

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
    sets, scoring = read_scored_pairs(translation_sources(settings)), settings.evaluation
    translators = {role: Translator.load(run, device=settings.training.device) for role, run in runs.items()}
    timed = [src for src, _ in next(iter(sets.values()))]
    speeds = measure_in_turns({role: partial(_translate, one, timed) for role, one in translators.items()}, TIMED, log)
    comparisons: dict[str, dict[str, SystemComparison]] = {}
    for name, pairs in sets.items():
        sources, references = [src for src, _ in pairs], [reference for _, reference in pairs]
        outputs = {role: [one.text for one in each.translate(sources)] for role, each in translators.items()}
        student = outputs.pop("student")
        comparisons[name] = {
            role: compare_translations(student, output, references, **scoring.model_dump(), names=("BLEU",))[0]
            for role, output in outputs.items()
        }
    systems = {
        role: DistilledSystem(
            run=str(run),
            n_parameters=sum(map(math.prod, shapes(run / "model.safetensors").values())),
            sentences_per_second=speeds[role],
            notes=translators[role].choice.notes(),
        )
        for role, run in runs.items()
    }
    return DistillationResult(systems, comparisons)


def _translate(translator: Translator, sources: Sequence[str], n: int) -> int:
    return len(translator.translate(sources[:n]))
