"""The state of a training: which validation is the best, and what a checkpoint restores."""

from __future__ import annotations

import json
from dataclasses import asdict

from pydantic import TypeAdapter

from transduce.training.feed import DataPosition
from transduce.training.meter import Row
from transduce.training.session import TrainingState, score_of


def test_bleu_decides_and_loss_breaks_ties() -> None:
    assert score_of({"loss": 2.0, "bleu": 30.0}, "bleu") > score_of({"loss": 1.0, "bleu": 29.0}, "bleu")
    assert score_of({"loss": 1.0, "bleu": 0.0}, "bleu") > score_of({"loss": 2.0, "bleu": 0.0}, "bleu")
    assert score_of({"loss": 1.0, "bleu": 0.0}, "loss") > score_of({"loss": 2.0, "bleu": 9.0}, "loss")
    assert score_of({"loss": 1.0}, "bleu") > score_of({"loss": 2.0}, "bleu")


def test_validations_since_the_best_are_counted() -> None:
    state, seen = TrainingState(), []
    for update, loss in enumerate((3, 2, 4, 1, 1, 5)):
        state.update = update
        seen.append((state.see({"loss": loss}, "loss"), state.best_update, state.since_best))
    assert seen == [(True, 0, 0), (True, 1, 0), (False, 1, 1), (True, 3, 0), (False, 3, 1), (False, 3, 2)]


def test_the_state_of_a_training_survives_json() -> None:
    row = Row(7, lr=0.1, n_targets=3, n_tokens=8, n_slots=10, loss_sum=1 / 3, nll_sum=0.2, grad_norm=1e-9)
    state = TrainingState(update=7, position=DataPosition(2, 3), seconds=1 / 7, rows=[row])
    state.see({"loss": 1 / 3, "bleu": 20.1}, "bleu")
    stored = json.dumps(asdict(state))
    found = TypeAdapter(TrainingState).validate_python(json.loads(stored))
    assert found == state and isinstance(found.rows[0], Row)
