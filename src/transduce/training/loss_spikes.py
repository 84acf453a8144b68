"""Detection of losses that are not finite, and of loss spikes.

There is a spike if the mean of the last `RECENT` updates exceeds the mean of the `BEFORE` updates before them

1. by `k` standard deviations of those earlier losses (as in Marian, so that noise and single odd batches pass);
2. by half of what the run has learned, which is the mean of its first losses minus the mean of the earlier ones. A run
   that still learns fluctuates less. One that diverges forgets nearly everything;
3. by half a nat per target (two thirds more perplexity). A fine-tuning has little left to learn, so that the second
   condition is weak there, and its warm-up may raise the loss for a while.

All three conditions must be met, and at least `FEWEST` updates must have been seen. To detect an earlier divergence,
there is also a spike if each of the last `RECENT` losses exceeds both `FAR` times the very first loss and `NOBODY`
nats. The first loss is that of the initial weights: about ln V for random ones, but near zero for some fine-tunings,
hence the second bound. Guessing among a million words or labels costs less than 14 nats, so a model above `NOBODY` is
worse than guessing. Short bumps after a first step that was too long stay below.

Both rules depend on losses only, so a resumed run decides as an uninterrupted one. A loss is measured before the
optimizer step of its update. The harmful step may therefore be that of the update before the first high loss, and the
suspects start with its batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from transduce.training.feed import Position

RECENT, BEFORE, FEWEST = 10, 100, 60
LEAST_RISE = 0.5  # nats per target
FAR, NOBODY = 3.0, 15.0  # times the first loss; nats per target

SPIKE = "spikes"
"""The reason of a `BadLoss` that is finite."""


class Suspect(NamedTuple):
    """An update, its loss in nats per target, and the position of its batch."""

    update: int
    loss: float
    epoch: int
    batch: int

    @property
    def position(self) -> Position:
        """Position of the batch in the data."""
        return Position(self.epoch, self.batch)


class BadLoss(Exception):
    """A loss that is not finite, or a spike. `suspects`: the updates whose batches may be the cause, in order."""

    def __init__(self, reason: str, suspects: Sequence[Suspect], *, lr: float, grad_norm: float, usual: float) -> None:
        self.reason, self.suspects = reason, tuple(suspects)
        self.lr, self.grad_norm, self.usual = lr, grad_norm, usual
        super().__init__(f"update {self.suspects[-1].update}: loss {self.suspects[-1].loss}: {reason}")


@dataclass(slots=True)
class Watch:
    """Watches the losses of all updates. `k`: see the module's docstring; 0 turns the detection of spikes off."""

    k: float = 5.0
    first: list[float] = field(default_factory=list)
    last: list[Suspect] = field(default_factory=list)

    def see(self, one: Suspect, *, lr: float, grad_norm: float) -> None:
        """Check the loss of an update; raises `BadLoss`."""
        if not (math.isfinite(one.loss) and math.isfinite(grad_norm)):
            raise BadLoss("is not finite", [one], lr=lr, grad_norm=grad_norm, usual=_mean(self.last))
        if len(self.first) < RECENT:
            self.first.append(one.loss)
        self.last = [*self.last[-(BEFORE + RECENT - 1) :], one]
        high = self._high() if self.k and len(self.last) > RECENT else None
        if high is not None:
            first_high = next(i for i in range(-RECENT, 0) if self.last[i].loss > high)
            suspects, usual = self.last[first_high - 1 :], _mean(self.last[:-RECENT])  # from the one before
            raise BadLoss(SPIKE, suspects, lr=lr, grad_norm=grad_norm, usual=usual)

    def _high(self) -> float | None:
        """The bound above which a loss is high, if there is a spike."""
        before, recent = (np.array([seen.loss for seen in part]) for part in (self.last[:-RECENT], self.last[-RECENT:]))
        if len(self.last) >= FEWEST:
            usual, deviation = float(before.mean()), float(before.std())
            rise = float(recent.mean()) - usual
            if rise > max(self.k * deviation, (float(np.mean(self.first)) - usual) / 2, LEAST_RISE):
                return usual + rise / 2
        far = max(FAR * self.first[0], NOBODY)
        return far if (recent > far).all() else None

    def state(self) -> dict[str, Any]:
        """The state, as JSON values."""
        return {"first": self.first, "last": [list(seen) for seen in self.last]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self.first = list(state.get("first", []))
        self.last = [Suspect(*seen) for seen in state.get("last", [])]


def _mean(seen: Sequence[Suspect]) -> float:
    return float(np.mean([one.loss for one in seen])) if seen else math.nan
