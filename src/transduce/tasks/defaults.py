"""What settings become that the user left open: pure functions of the data and the machine, each with its reason.

`SIZES` is the one table of sizes and lengths; the rest follows from it by the functions of `BEFORE_TEXT` (which need to
know the number of pairs) and `BEFORE_TRAINING` (which need to know the tokens too). A setting that was given is never
touched. The numbers are what measured best under benchmarks/; each can be overridden with `--set section.key=value`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transduce.config import ModelSettings, Settings
from transduce.config.model import preset_values
from transduce.machine import Machine


@dataclass(frozen=True, slots=True)
class Size:
    """What suits corpora of at most so many sentence pairs (texts, bytes); of a pair (cpu, gpu) the machine decides."""

    most: float
    vocab_size: int
    preset: tuple[str, str]
    dropout: float
    batch_tokens: tuple[int, int]
    epochs: float
    minutes: tuple[float, float]


SIZES = (
    Size(2_000, 2_000, ("tiny", "tiny"), 0.3, (1024, 1024), 60, (10, 5)),
    Size(20_000, 4_000, ("tiny", "tiny"), 0.3, (2048, 2048), 40, (20, 10)),
    Size(50_000, 8_000, ("tiny", "small"), 0.2, (2048, 4096), 20, (30, 20)),
    Size(150_000, 8_000, ("small", "small"), 0.2, (4096, 8192), 20, (90, 30)),
    Size(1_000_000, 16_000, ("small", "base"), 0.1, (8192, 24_576), 15, (360, 240)),
    Size(float("inf"), 32_000, ("small", "base"), 0.1, (8192, 32_768), 10, (1440, 1440)),
)
PEAK_LR = {"adam": 0.64, "adamw": 0.64, "muon": 0.64}  # times 1 / d_model: 0.005 at 128, 0.00125 at 512
MATRIX_LR = 1.28  # the same for Muon's matrices
SHORTEST_WARMUP = 10
LONGEST_WARMUP = 2000
SIZE_KEYS = frozenset({"preset", "d_model", "d_ff", "n_heads", "n_encoder_layers", "n_decoder_layers"})
TOKENS_A_PAIR = 15  # a guess at the target, until the text is encoded


@dataclass(frozen=True, slots=True)
class Facts:
    """All that a choice may depend on. `tokens`, None before encoding: of the longer side of all pairs, or of the text.

    Text in pairs is measured in `n_pairs`, running text in `n_bytes`; the other is 0.
    """

    asked: Settings
    settings: Settings
    machine: Machine
    n_pairs: int
    tokens: int | None = None
    n_bytes: int = 0

    @property
    def size(self) -> Size:
        """The line of the table."""
        return next(size for size in SIZES if self.n_pairs <= size.most)

    @property
    def on_gpu(self) -> int:
        """0 or 1: which of a (cpu, gpu) pair."""
        return int(self.machine.device == "cuda")

    @property
    def updates_an_epoch(self) -> float:
        """Updates in a pass over the data."""
        assert self.settings.training.batch_tokens is not None, "chosen first"
        return max(1.0, (self.tokens or self.n_pairs * TOKENS_A_PAIR) / self.settings.training.batch_tokens)

    @property
    def updates_a_minute(self) -> float:
        """A rough estimate from the model's size and the machine's."""
        assert self.settings.training.batch_tokens is not None, "chosen first"
        work = 6.0 * parameters_used(self.settings.model, self.settings.tokenizer.vocab_size or 0)
        return 60.0 * self.machine.flops / (work * self.settings.training.batch_tokens)

    @property
    def updates(self) -> float:
        """Updates until the nearest limit, roughly."""
        training = self.settings.training
        ends = [
            training.max_updates,
            training.max_epochs and training.max_epochs * self.updates_an_epoch,
            training.max_minutes and training.max_minutes * self.updates_a_minute,
        ]
        return min(end for end in ends if end is not None)


@dataclass(frozen=True, slots=True)
class Choice:
    """One setting that was left open, what it becomes, and why, in one sentence."""

    section: str
    key: str
    value: Any
    reason: str


Answer = tuple[Any, str] | None
Chooser = tuple[str, str, Callable[[Facts], Answer]]


def choose(facts: Facts, choosers: Sequence[Chooser]) -> tuple[Settings, list[Choice]]:
    """The settings with what was left open filled in, and what was chosen. Later choices see the earlier ones."""
    choices = []
    for section, key, function in choosers:
        if not _is_open(facts, section, key) or (answer := function(facts)) is None:
            continue
        value, reason = answer
        choices.append(Choice(section, key, value, reason))
        facts = replace(facts, settings=facts.settings.with_values(section, **{key: value}))
    return facts.settings, choices


def table(choices: Sequence[Choice]) -> list[str]:
    """Lines for people: the name, the value and the reason of each choice."""
    names = [f"{choice.section}.{choice.key}" for choice in choices]
    values = [f"{choice.value:,}" if type(choice.value) is int else str(choice.value) for choice in choices]
    widths = max(map(len, names), default=0), max(map(len, values), default=0)
    rows = zip(names, values, choices, strict=True)
    return [f"  {name:<{widths[0]}}  {value:>{widths[1]}}  {choice.reason}" for name, value, choice in rows]


def parameters_used(model: ModelSettings, vocab_size: int) -> int:
    """Weights that a target token passes through, roughly: the blocks' and the output's."""
    d, n_blocks = model.d_model, sum(model.depth)
    return 4 * model.n_attentions * d * d + 2 * n_blocks * d * model.d_ff + vocab_size * d


def bytes_a_token(model: ModelSettings, vocab_size: int) -> int:
    """Memory of a training step for one padded token on either side, roughly: activations kept for the gradient."""
    return 4 * (model.n_attentions * (20 * model.d_model + 4 * model.d_ff + 128 * model.n_heads) + 3 * vocab_size)


def _is_open(facts: Facts, section: str, key: str) -> bool:
    """Whether the user, and the preset, left the setting to us."""
    part = getattr(facts.asked, section)
    given = part.model_fields_set
    if section == "model":
        own = preset_values(facts.settings.model)
        return not (given & SIZE_KEYS) if key == "preset" else key not in given and key not in own
    return key not in given or getattr(part, key) in (None, "auto")


def _pairs(facts: Facts) -> str:
    return f"{facts.n_pairs:,} pairs"


def _vocab_size(facts: Facts) -> Answer:
    return facts.size.vocab_size, f"suits {_pairs(facts)}: pieces must be seen often enough to be learned"


def _preset(facts: Facts) -> Answer:
    where = "on a GPU" if facts.on_gpu else "without a GPU"
    return facts.size.preset[facts.on_gpu], f"the size that {_pairs(facts)} can fill in reasonable time {where}"


def _dropout(facts: Facts) -> Answer:
    more = "little text needs more of it" if facts.size.dropout > 0.1 else "the paper's: there is enough text"
    return facts.size.dropout, more


def _tie(facts: Facts) -> Answer:
    return None if facts.asked.tokenizer.joint else ("two_way", "each side has a vocabulary of its own")


def _batch_tokens(facts: Facts) -> Answer:
    tokens = facts.size.batch_tokens[facts.on_gpu]
    return tokens, f"tokens an update, from the {_pairs(facts)} and the {facts.machine.device}"


def _micro_batch_tokens(facts: Facts) -> Answer:
    wanted = facts.settings.training.batch_tokens
    assert wanted is not None, "chosen first"
    a_token = bytes_a_token(facts.settings.model, facts.settings.tokenizer.vocab_size or 0)
    fitting = max(256, facts.machine.memory // 2 // a_token)
    if fitting >= wanted:
        return wanted, f"a whole update fits in half of the {facts.machine.memory / 2**30:.0f} GiB free"
    n = -(-wanted // fitting)
    return -(-wanted // n), f"an update in {n} parts, each in half of the {facts.machine.memory / 2**30:.1f} GiB free"


def _precision(facts: Facts) -> Answer:
    return facts.machine.precision, "in which this machine multiplies matrices fastest, as just measured"


def _residual(facts: Facts) -> Answer:
    return "pre", "norm before the sub-layer learns faster and needs less warm-up"


def _optimizer(facts: Facts) -> Answer:
    if facts.on_gpu or facts.settings.model.d_model <= 256:
        return "muon", "learns more from an epoch than Adam, at small cost"
    return "adamw", "at this width Muon's products cost a CPU too much"


def _matrix_lr(facts: Facts) -> Answer:
    if facts.settings.training.optimizer != "muon":
        return None
    width = facts.settings.model.d_model
    return round(MATRIX_LR / width, 6), f"peak for the matrices under muon at d_model {width}"


def _lr(facts: Facts) -> Answer:
    name = facts.settings.training.optimizer
    assert name is not None, "chosen first"
    width = facts.settings.model.d_model
    return round(PEAK_LR[name] / width, 6), f"peak for {name} at d_model {width}"


def _max_epochs(facts: Facts) -> Answer:
    if length_is_given(facts):
        return None
    return facts.size.epochs, f"passes after which {_pairs(facts)} have little more to give"


def _max_minutes(facts: Facts) -> Answer:
    if length_is_given(facts):
        return None
    minutes = facts.size.minutes[facts.on_gpu]
    return minutes, "your patience, at a guess; the schedule ends with the nearer of the limits"


def length_is_given(facts: Facts) -> bool:
    """Whether the user has said when training ends."""
    training = facts.asked.training
    return not (training.max_updates is training.max_epochs is training.max_minutes is None)


def _schedule(facts: Facts) -> Answer:
    return "linear", "falls to zero at the end, which does better than the paper's in a short training"


def _warmup_updates(facts: Facts) -> Answer:
    share, half = 0.08 * facts.updates, facts.updates / 2
    updates = round(min(LONGEST_WARMUP, max(SHORTEST_WARMUP, share), half))
    expected = f"the {facts.updates:,.0f} updates expected"
    if half < SHORTEST_WARMUP:
        return updates, f"half of {expected}, as they are few"
    if share < SHORTEST_WARMUP:
        return updates, f"at least {SHORTEST_WARMUP}, where 8 % of {expected} are fewer"
    if share > LONGEST_WARMUP:
        return updates, f"at most {LONGEST_WARMUP:,}, where 8 % of {expected} are more"
    return updates, f"about 8 % of {expected}"


def _valid_updates(facts: Facts) -> Answer:
    updates = min(max(facts.updates_an_epoch, facts.updates_a_minute / 2), facts.updates / 5)
    return max(1, round(updates)), "about an epoch, or half a minute where epochs are shorter"


BEFORE_TEXT: tuple[Chooser, ...] = (
    ("tokenizer", "vocab_size", _vocab_size),
    ("model", "preset", _preset),
    ("model", "dropout", _dropout),
    ("model", "residual", _residual),
    ("model", "tie", _tie),
)
BEFORE_TRAINING: tuple[Chooser, ...] = (
    ("training", "batch_tokens", _batch_tokens),
    ("training", "micro_batch_tokens", _micro_batch_tokens),
    ("training", "precision", _precision),
    ("training", "optimizer", _optimizer),
    ("training", "lr", _lr),
    ("training", "matrix_lr", _matrix_lr),
    ("training", "max_epochs", _max_epochs),
    ("training", "max_minutes", _max_minutes),
    ("training", "schedule", _schedule),
    ("training", "warmup_updates", _warmup_updates),
    ("training", "valid_updates", _valid_updates),
)


def laid_over(own: Sequence[Chooser], usual: Sequence[Chooser]) -> tuple[Chooser, ...]:
    """`usual`, with `own` in the place of what chooses the same; what only `own` has comes first."""
    ours, known = {(section, key): function for section, key, function in own}, {(s, k) for s, k, _ in usual}
    first = tuple((section, key, function) for section, key, function in own if (section, key) not in known)
    return first + tuple((section, key, ours.get((section, key), function)) for section, key, function in usual)
