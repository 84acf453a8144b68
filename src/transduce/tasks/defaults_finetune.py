"""What settings become that the user left open, where a run of any task begins with the weights of another.

As `choose.py`, whose rules hold here too; laid over what the task chooses.
"""

from __future__ import annotations

from transduce.tasks.defaults import Answer, Chooser, Facts, length_is_given

LR = 0.04  # times 1 / d_model, for weights that know something: 3e-4 at 128, 8e-5 at 512, 5e-5 at 768
MATRIX_LR = 0.08  # the same for Muon's matrices
EPOCHS = 3.0


def _careful_optimizer(facts: Facts) -> Answer:
    return "adamw", "changes what was learned before but little"


def _careful_lr(facts: Facts) -> Answer:
    width = facts.settings.model.d_model
    reason = f"far below a fresh model's at d_model {width}: more would undo what the weights know"
    return round(LR / width, 7), reason


def _careful_matrix_lr(facts: Facts) -> Answer:
    if facts.settings.training.optimizer != "muon":
        return None
    width = facts.settings.model.d_model
    return round(MATRIX_LR / width, 7), f"peak for the matrices under muon at d_model {width}, as far below"


def _few_epochs(facts: Facts) -> Answer:
    if length_is_given(facts):
        return None
    return EPOCHS, "what fine-tuning takes; more fits the new text closer, and forgets more"


BEFORE_FINE_TUNING: tuple[Chooser, ...] = (
    ("training", "optimizer", _careful_optimizer),
    ("training", "lr", _careful_lr),
    ("training", "matrix_lr", _careful_matrix_lr),
    ("training", "max_epochs", _few_epochs),
)
