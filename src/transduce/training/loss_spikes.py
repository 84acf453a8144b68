"""Watches the loss of every update: one that is not finite, or that explodes, is told at once, with its batches.

A loss has exploded when the mean of the last `RECENT` updates lies above that of the `BEFORE` updates before them

1. by `k` standard deviations of the losses of those (the same test as Marian's: noise, and single odd batches, pass);
2. by half of what the run had learned, from its first updates down to that mean: the ups and downs of a run that
   still learns are smaller than that, while one that diverges falls back to telling frequent words, far above half;
3. by half a nat a target, two thirds more perplexity: a fine-tuning that begins near where it ends has learned so
   little that the second sign is nothing, and warming up may cost it some of that for a while.

All three are needed, and 60 updates to judge by. A run that blows up before that has nothing usual to be held against
but its beginning: it has exploded, too, when each of the last `RECENT` losses lies above `FAR` times the very first
and above `NOBODY` nats. The first loss is measured before any step: it is what a model has that knows nothing (ln V,
up to twice that where weights begin badly), or what a fine-tuning begins with, which may be next to nothing; hence
the second bound. Equal odds for a million words or labels come to less than 14 nats, so that above it, update after
update, a model is worse than guessing, whatever the task, and surely wrong. The bump of a step that was too long at
the start, which passes, is lower or shorter.

Both rules are functions of losses alone, so a resumed run judges as it
would have without the stop. Losses are measured before the step that they give, so the step that did the harm may be
that of the update before the first high loss: the batches of that one on are the suspects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from transduce.training.feed import Position

RECENT, BEFORE, FEWEST = 10, 100, 60
LEAST_RISE = 0.5  # nats a target
FAR, NOBODY = 3.0, 15.0  # times the first loss; nats a target


class Suspect(NamedTuple):
    """An update, its loss in nats a target, and where its batch stands."""

    update: int
    loss: float
    epoch: int
    batch: int

    @property
    def position(self) -> Position:
        """The place of the batch in the plans."""
        return Position(self.epoch, self.batch)


class BadLoss(Exception):
    """A loss that a run should not go on with. `suspects`: the updates whose batches may have done it, in order."""

    def __init__(self, reason: str, suspects: Sequence[Suspect], *, lr: float, grad_norm: float, usual: float) -> None:
        self.reason, self.suspects = reason, tuple(suspects)
        self.lr, self.grad_norm, self.usual = lr, grad_norm, usual
        super().__init__(f"update {self.suspects[-1].update}: loss {self.suspects[-1].loss}: {reason}")


@dataclass(slots=True)
class Watch:
    """The losses of the last updates, and of the first; `k` deviations count as an explosion, 0 never."""

    k: float = 5.0
    first: list[float] = field(default_factory=list)
    last: list[Suspect] = field(default_factory=list)

    def see(self, one: Suspect, *, lr: float, grad_norm: float) -> None:
        """Take note of an update; raises `BadLoss`."""
        if not (math.isfinite(one.loss) and math.isfinite(grad_norm)):
            raise BadLoss("is not finite", [one], lr=lr, grad_norm=grad_norm, usual=self._usual())
        if len(self.first) < RECENT:
            self.first.append(one.loss)
        self.last = [*self.last[-(BEFORE + RECENT - 1) :], one]
        high = self._high() if self.k and len(self.last) > RECENT else None
        if high is not None:
            usual = float(np.mean([seen.loss for seen in self.last[:-RECENT]]))
            raise BadLoss("explodes", self._suspects(high), lr=lr, grad_norm=grad_norm, usual=usual)

    def _high(self) -> float | None:
        """If the loss has exploded, what lies above it is high."""
        before, recent = (np.array([seen.loss for seen in part]) for part in (self.last[:-RECENT], self.last[-RECENT:]))
        if len(self.last) >= FEWEST:
            usual, deviation = float(before.mean()), float(before.std())
            rise = float(recent.mean()) - usual
            if rise > max(self.k * deviation, (float(np.mean(self.first)) - usual) / 2, LEAST_RISE):
                return usual + rise / 2
        far = max(FAR * self.first[0], NOBODY)
        return far if (recent > far).all() else None

    def _suspects(self, high: float) -> list[Suspect]:
        """From the update before the first high loss on."""
        at = next(i for i in range(-RECENT, 0) if self.last[i].loss > high)
        return self.last[at - 1 :]

    def _usual(self) -> float:
        """The mean of the last losses."""
        return float(np.mean([seen.loss for seen in self.last])) if self.last else math.nan

    def state(self) -> dict[str, Any]:
        """JSON-able state."""
        return {"first": self.first, "last": [list(seen) for seen in self.last]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state."""
        self.first = list(state.get("first", []))
        self.last = [Suspect(*seen) for seen in state.get("last", [])]
