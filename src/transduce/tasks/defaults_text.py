"""What settings become that the user left open, where text is not pairs. As `choose.py`, whose rules hold here too."""

from __future__ import annotations

from dataclasses import dataclass

from transduce.config import resolve_preset
from transduce.tasks.defaults import BEFORE_TRAINING, Answer, Chooser, Facts, laid_over, length_is_given


@dataclass(frozen=True, slots=True)
class TextSize:
    """What suits running text of at most `n_bytes`; of a pair (cpu, gpu) the machine decides."""

    n_bytes: float
    kind: str
    vocab_size: int
    preset: tuple[str, str]
    dropout: float
    context: tuple[int, int]
    rows: tuple[int, int]
    epochs: float
    minutes: tuple[float, float]


TEXT_SIZES = (
    TextSize(3e5, "char", 512, ("gpt-tiny", "gpt-tiny"), 0.2, (64, 64), (16, 32), 60, (5, 3)),
    TextSize(2e6, "char", 512, ("gpt-tiny", "gpt-small"), 0.1, (128, 256), (32, 64), 30, (20, 10)),
    TextSize(2e7, "bpe", 2_000, ("gpt-tiny", "gpt-small"), 0.1, (128, 256), (32, 64), 10, (60, 30)),
    TextSize(2e8, "bpe", 8_000, ("gpt-small", "gpt-small"), 0.1, (256, 512), (32, 64), 4, (360, 120)),
    TextSize(float("inf"), "bpe", 16_000, ("gpt-small", "gpt2"), 0.0, (256, 1024), (32, 64), 2, (1440, 1440)),
)
LR, MATRIX_LR = 0.384, 0.768  # times 1 / d_model: 0.003 and 0.006 at 128, which did better than more


def _size(facts: Facts) -> TextSize:
    return next(size for size in TEXT_SIZES if facts.n_bytes <= size.n_bytes)


def _text(facts: Facts) -> str:
    for unit, n in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if facts.n_bytes >= n:
            return f"{facts.n_bytes / n:.3g} {unit} of text"
    return f"{facts.n_bytes} bytes of text"


def _exact(facts: Facts) -> Answer:
    return True, "text is given back as it was, line ends and rare characters too"


def _normalization(facts: Facts) -> Answer:
    return "identity", "as tokenizer.exact asks for"


def _kind(facts: Facts) -> Answer:
    kind = _size(facts).kind
    return kind, f"{_text(facts)}: " + ("too little to learn longer pieces" if kind == "char" else "enough for pieces")


def _vocab_size(facts: Facts) -> Answer:
    if facts.settings.tokenizer.kind == "char":
        return 4_096, "at most: the characters of the text, and the 256 bytes for all others"
    size = _size(facts).vocab_size
    return max(1_000, size), f"suits {_text(facts)}: pieces must be seen often enough to be learned"


def _preset(facts: Facts) -> Answer:
    where = "on a GPU" if facts.on_gpu else "without a GPU"
    return _size(facts).preset[facts.on_gpu], f"the size that {_text(facts)} can fill in reasonable time {where}"


def _dropout(facts: Facts) -> Answer:
    dropout = _size(facts).dropout
    return dropout, "little text needs more of it" if dropout > 0.1 else "the text is hardly seen twice"


def _residual(facts: Facts) -> Answer:
    return "pre", "norm before the sub-layer learns faster and needs less warm-up"


def _positions(facts: Facts) -> Answer:
    model = resolve_preset(facts.settings.model)
    if model.d_head % 2:
        return None
    return "rotary", "distances, not places: learns faster than the others"


def _activation(facts: Facts) -> Answer:
    return "gelu", "GPT's"


def _context(facts: Facts) -> Answer:
    context = _size(facts).context[facts.on_gpu]
    model = resolve_preset(facts.settings.model)
    if model.positions == "learned":
        context = min(context, model.max_positions)
    return context, f"tokens seen at once, from the {_text(facts)} and the {facts.machine.device}"


def _batch_tokens(facts: Facts) -> Answer:
    context, n_rows = facts.settings.data.context, _size(facts).rows[facts.on_gpu]
    assert context is not None, "chosen first"
    return context * n_rows, f"{n_rows} rows of {context} tokens an update"


def _label_smoothing(facts: Facts) -> Answer:
    return 0.0, "probabilities are what is wanted here, unsmoothed"


def _lr(facts: Facts) -> Answer:
    training, width = facts.settings.training, facts.settings.model.d_model
    return round(LR / width, 6), f"peak for {training.optimizer} at d_model {width}"


def _matrix_lr(facts: Facts) -> Answer:
    if facts.settings.training.optimizer != "muon":
        return None
    width = facts.settings.model.d_model
    return round(MATRIX_LR / width, 6), f"peak for the matrices under muon at d_model {width}"


def _max_epochs(facts: Facts) -> Answer:
    if length_is_given(facts):
        return None
    return _size(facts).epochs, f"passes after which {_text(facts)} have little more to give"


def _max_minutes(facts: Facts) -> Answer:
    if length_is_given(facts):
        return None
    return _size(facts).minutes[
        facts.on_gpu
    ], "your patience, at a guess; the schedule ends with the nearer of the limits"


BEFORE_TEXT: tuple[Chooser, ...] = (
    ("tokenizer", "exact", _exact),
    ("tokenizer", "normalization", _normalization),
    ("tokenizer", "kind", _kind),
    ("tokenizer", "vocab_size", _vocab_size),
    ("model", "preset", _preset),
    ("model", "dropout", _dropout),
    ("model", "residual", _residual),
    ("model", "positions", _positions),
    ("model", "activation", _activation),
    ("data", "context", _context),
)


BEFORE_TRAINING_ON_TEXT = laid_over(
    (
        ("training", "label_smoothing", _label_smoothing),
        ("training", "batch_tokens", _batch_tokens),
        ("training", "lr", _lr),
        ("training", "matrix_lr", _matrix_lr),
        ("training", "max_epochs", _max_epochs),
        ("training", "max_minutes", _max_minutes),
    ),
    BEFORE_TRAINING,
)
