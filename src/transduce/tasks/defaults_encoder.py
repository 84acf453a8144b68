"""What settings become that the user left open, for an encoder alone. As `choose.py`, whose rules hold here too."""

from __future__ import annotations

from transduce.config import resolve_preset
from transduce.tasks.defaults import BEFORE_TRAINING, Answer, Chooser, Facts, Size, laid_over, length_is_given

LABELLED_SIZES = (  # by texts
    Size(5_000, 4_000, ("bert-tiny", "bert-tiny"), 0.3, (1024, 1024), 20, (5, 3)),
    Size(200_000, 8_000, ("bert-tiny", "bert-tiny"), 0.3, (2048, 4096), 8, (15, 5)),
    Size(float("inf"), 16_000, ("bert-mini", "bert-mini"), 0.1, (4096, 16_384), 3, (120, 30)),
)
TEXT_SIZES = (  # by bytes
    Size(2e6, 2_000, ("bert-tiny", "bert-tiny"), 0.1, (4096, 8192), 40, (20, 10)),
    Size(5e7, 8_000, ("bert-tiny", "bert-mini"), 0.1, (4096, 16_384), 15, (120, 60)),
    Size(float("inf"), 16_000, ("bert-mini", "bert-small"), 0.1, (8192, 32_768), 4, (1440, 720)),
)


def _size(facts: Facts) -> Size:
    sizes, n = (TEXT_SIZES, facts.n_bytes) if facts.n_bytes else (LABELLED_SIZES, facts.n_pairs)
    return next(size for size in sizes if n <= size.most)


def _what(facts: Facts) -> str:
    return f"{facts.n_bytes / 1e6:.3g} MB of text" if facts.n_bytes else f"{facts.n_pairs:,} labelled texts"


def _vocab_size(facts: Facts) -> Answer:
    return _size(facts).vocab_size, f"suits {_what(facts)}: pieces must be seen often enough to be learned"


def _mask(facts: Facts) -> Answer:
    return True, "the model fills gaps"


def _preset(facts: Facts) -> Answer:
    where = "on a GPU" if facts.on_gpu else "without a GPU"
    return _size(facts).preset[facts.on_gpu], f"the size that {_what(facts)} can fill in reasonable time {where}"


def _dropout(facts: Facts) -> Answer:
    dropout = _size(facts).dropout
    return dropout, "little text needs more of it" if dropout > 0.1 else "BERT's: there is enough text"


def _context(facts: Facts) -> Answer:
    model = resolve_preset(facts.settings.model)
    longest = model.max_positions if model.positions == "learned" else 128
    return min(128, longest), "tokens seen at once; most sentences are shorter"


def _batch_tokens(facts: Facts) -> Answer:
    return _size(facts).batch_tokens[facts.on_gpu], f"tokens an update, from the {_what(facts)}"


def _no_smoothing(facts: Facts) -> Answer:
    return 0.0, "probabilities are what is wanted here, unsmoothed"


def _max_epochs(facts: Facts) -> Answer:
    if length_is_given(facts):
        return None
    return _size(facts).epochs, f"passes after which {_what(facts)} have little more to give"


def _max_minutes(facts: Facts) -> Answer:
    if length_is_given(facts):
        return None
    return _size(facts).minutes[facts.on_gpu], "your patience, at a guess; the nearer of the limits ends the schedule"


def _by_accuracy(facts: Facts) -> Answer:
    return "accuracy", "what the run is for"


def _by_loss(facts: Facts) -> Answer:
    return "loss", "what the run is for"


BEFORE_LABELLED: tuple[Chooser, ...] = (
    ("tokenizer", "vocab_size", _vocab_size),
    ("model", "preset", _preset),
    ("model", "dropout", _dropout),
)
BEFORE_MASKED: tuple[Chooser, ...] = (
    ("tokenizer", "vocab_size", _vocab_size),
    ("tokenizer", "mask", _mask),
    ("model", "preset", _preset),
    ("model", "dropout", _dropout),
    ("data", "context", _context),
)
_OWN: tuple[Chooser, ...] = (
    ("training", "batch_tokens", _batch_tokens),
    ("training", "max_epochs", _max_epochs),
    ("training", "max_minutes", _max_minutes),
)
BEFORE_TRAINING_LABELLED = laid_over((("training", "stop_by", _by_accuracy), *_OWN), BEFORE_TRAINING)
BEFORE_TRAINING_MASKED = laid_over(
    (("training", "stop_by", _by_loss), ("training", "label_smoothing", _no_smoothing), *_OWN), BEFORE_TRAINING
)
