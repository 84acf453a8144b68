"""What `transduce.doctor` gives back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from transduce.config import Settings
from transduce.doctor.findings import Finding
from transduce.doctor.forecast import Disk, Time
from transduce.doctor.measuring import Trial
from transduce.doctor.progress import Progress
from transduce.doctor.resources import fitting_tokens
from transduce.doctor.sampling import Sample
from transduce.doctor.tokens import Lengths


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Findings, and what was measured. What is None could not be, or there was no need.

    `sample` tells what was looked at, without the text. `settings` are those that training would have, nothing open.
    """

    findings: tuple[Finding, ...]
    sample: Sample | None = None
    seconds: float = 0.0
    machine: str = ""
    available: int = 0
    settings: Settings | None = None
    lengths: tuple[Lengths, ...] = ()
    trial: Trial | None = None
    time: Time | None = None
    disk: Disk | None = None
    progress: Progress | None = None

    @property
    def ready(self) -> bool:
        """Whether there is no obstacle."""
        return not self.obstacles

    @property
    def obstacles(self) -> tuple[Finding, ...]:
        """What must be mended first."""
        return tuple(one for one in self.findings if one.level == "obstacle")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What is worth a look."""
        return tuple(one for one in self.findings if one.level == "warning")

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """What the trial did not tell, where there was a training to try."""
        if self.progress is not None and self.progress.finished:
            return ()
        known = {
            "memory": self.trial is not None and self.trial.memory is not None,
            "speed": self.trial is not None and self.trial.speed is not None,
            "time": self.time is not None,
            "disk": self.disk is not None,
        }
        return tuple(name for name, there in known.items() if not there)

    @property
    def fitting_tokens(self) -> int | None:
        """The micro-batch that fits this machine, in tokens."""
        if self.trial is None or self.settings is None:
            return None
        return fitting_tokens(self.settings, self.trial, self.available)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        sample, trial = self.sample, self.trial
        data = None
        if sample is not None:
            keys = ("name", "files", "counts", "total", "counted", "how")
            data = {
                "kind": sample.form,
                "corpora": [{key: getattr(part, key) for key in keys} for part in sample.parts],
                "held_out": [{key: getattr(part, key) for key in keys} for part in sample.held],
                "looked_at": sample.n_rows,
            }
        return {
            "ready": self.ready,
            "findings": [finding.to_json() for finding in self.findings],
            "data": data,
            "lengths": [asdict(side) for side in self.lengths],
            "machine": self.machine,
            "available": self.available,
            "memory": asdict(trial.memory) if trial is not None and trial.memory is not None else None,
            "fitting_tokens": self.fitting_tokens,
            "trial": asdict(trial) if trial is not None else None,
            "time": {**asdict(self.time), "total": self.time.total} if self.time is not None else None,
            "disk": asdict(self.disk) if self.disk is not None else None,
            "run": asdict(self.progress) if self.progress is not None else None,
            "settings": self.settings.model_dump(mode="json") if self.settings is not None else None,
            "seconds": round(self.seconds, 2),
        }
