"""Results of translators, generators and masked language models."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from transduce.logging import Log

Style = Literal["text", "scores", "nbest", "json"]
MAX_NOTES = 5
"""Notes about single lines that are printed before only their number is counted."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One output for a line. `log_prob`: nats, with the end of the sentence; `score`: what the search ranks by.

    `finished` is False where the output was cut off at the length limit. `attention`: see `Hypothesis`.
    """

    text: str
    ids: tuple[int, ...]
    log_prob: float
    score: float
    finished: bool = True
    attention: np.ndarray | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Translation:
    """The translation of a line: candidates, best first (samples: in the order drawn), and a note for the user."""

    candidates: tuple[Candidate, ...]
    note: str = ""

    @property
    def text(self) -> str:
        """The best candidate's text."""
        return self.candidates[0].text

    @property
    def ids(self) -> tuple[int, ...]:
        """The best candidate's token ids, without special ones."""
        return self.candidates[0].ids

    @property
    def log_prob(self) -> float:
        """The best candidate's log-probability."""
        return self.candidates[0].log_prob

    @property
    def score(self) -> float:
        """The best candidate's score: log_prob / length ** length_penalty."""
        return self.candidates[0].score

    @property
    def finished(self) -> bool:
        """Whether the best candidate is complete, not cut off."""
        return self.candidates[0].finished


class Note(NamedTuple):
    """A note on line `number` of a text. `lost`: the line has no translation."""

    number: int
    text: str
    lost: bool


def note_on(style: Style, number: int, src: str, translation: Translation) -> Note | None:
    """The note to print for line `number`, or None. JSON contains the note."""
    if not translation.note or style == "json":
        return None
    return Note(number, translation.note, bool(src.strip()) and not translation.text)


class Notes:
    """Warns of notes on translations: of the first `most`, of every line without a translation, and of their number."""

    def __init__(self, log: Log, *, most: int = MAX_NOTES) -> None:
        self._log, self._most, self._n = log, most, 0

    def show(self, note: Note, *, file: str = "") -> None:
        """Warn of one note, in this file."""
        self._n += not note.lost
        if note.lost or self._n <= self._most:
            self._log.warn(f"{file}line {note.number}: {note.text}")

    def close(self, n_lines: int) -> None:
        """Warn of the number of notes if some were not shown."""
        if self._n > self._most:
            self._log.warn(
                f"{self._n:,} of {n_lines:,} lines have notes; the first {self._most} are shown, JSON has all"
            )


def format_rows(style: Style, number: int, src: str, translation: Translation, *, n_best: int = 1) -> list[str]:
    """Lines of output for line `number` of a text: `n_best` for that style, one for the others.

    Line ends inside a text become spaces, so that every row is one line.
    """
    if style == "json":
        shown = ("text", "log_prob", "score", "finished")
        candidates = [{name: getattr(one, name) for name in shown} for one in translation.candidates]
        note = {"note": translation.note} if translation.note else {}
        values = {"line": number, "src": src, "text": translation.text, "candidates": candidates, **note}
        rows = [json.dumps(values, ensure_ascii=False)]
    elif style == "nbest":
        rows = [f"{number}\t{one.score:.4f}\t{one.text}" for one in translation.candidates]
        rows += [rows[-1]] * (n_best - len(rows))  # the same number of rows for every line
    elif style == "scores":
        rows = [f"{translation.score:.4f}\t{translation.text}"]
    else:
        rows = [translation.text]
    return [row.replace("\r", " ").replace("\n", " ") for row in rows]


@dataclass(frozen=True, slots=True)
class TextLogProbs:
    """Log-probabilities of a given text: nats, token by token; the last is the end of the text."""

    token_log_probs: tuple[float, ...]

    @property
    def log_prob(self) -> float:
        """Sum over the tokens."""
        return sum(self.token_log_probs)

    @property
    def n_tokens(self) -> int:
        """Tokens, with the end."""
        return len(self.token_log_probs)


@dataclass(frozen=True, slots=True)
class Generation:
    """The continuation of a prompt. `text` and `ids`: what is new; `log_prob`: nats, without temperature and cuts.

    `finished` is False where the text was cut off at the length limit.
    """

    prompt: str
    text: str
    ids: tuple[int, ...]
    log_prob: float
    finished: bool = True


@dataclass(frozen=True, slots=True)
class TextScore:
    """The loss on running text: `nats` summed over `n_tokens`, whose text has `n_bytes` in UTF-8."""

    nats: float
    n_tokens: int
    n_bytes: int
    context: int
    stride: int
    memory: int | None = None

    @property
    def nll(self) -> float:
        """Nats per token, with the ends of documents."""
        return self.nats / self.n_tokens

    @property
    def perplexity(self) -> float:
        """exp of the nats per token; depends on the vocabulary."""
        return math.exp(min(self.nll, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text; does not depend on the vocabulary."""
        return self.nats / math.log(2) / self.n_bytes

    def to_json(self) -> dict[str, float]:
        """Plain values."""
        return {
            "nll": self.nll,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.n_tokens,
            "bytes": self.n_bytes,
            "context": self.context,
            "stride": self.stride,
            **({} if self.memory is None else {"memory": self.memory}),
        }

    def lines(self) -> list[str]:
        """Lines to print."""
        rows = f"rows of {self.context} tokens, {self.stride} new each"
        if self.memory is not None:
            rows = f"segments of {self.context} tokens, a memory of {self.memory:,}"
        return [
            f"perplexity {self.perplexity:.3f} per token, {self.nll:.4f} nats per token, "
            f"{self.bits_per_byte:.4f} bits per byte",
            f"{self.n_tokens:,} tokens, {self.n_bytes:,} bytes; {rows}",
        ]


@dataclass(frozen=True, slots=True)
class MaskedScore:
    """The loss on `n_hidden` masked tokens. `nll`: nats per masked token. `n_tokens`, `n_bytes`: of the text.

    `loss` is the training loss: `nll`, and the loss on pairs if the model predicts next sentences. Accuracies are
    fractions; that of next sentences is None without pairs.
    """

    loss: float
    nll: float
    masked_accuracy: float
    next_sentence_accuracy: float | None
    n_hidden: int
    n_tokens: int
    n_bytes: int

    @property
    def perplexity(self) -> float:
        """exp of the nats per masked token; depends on the vocabulary."""
        return math.exp(min(self.nll, 700.0))

    def to_json(self) -> dict[str, float]:
        """Plain values."""
        pairs = self.next_sentence_accuracy
        return {
            "loss": self.loss,
            "nll": self.nll,
            "perplexity": self.perplexity,
            "masked_accuracy": self.masked_accuracy,
            **({} if pairs is None else {"next_sentence_accuracy": pairs}),
            "hidden": self.n_hidden,
            "tokens": self.n_tokens,
            "bytes": self.n_bytes,
        }

    def lines(self) -> list[str]:
        """Lines to print."""
        pairs = self.next_sentence_accuracy
        follows = "" if pairs is None else f", next-sentence accuracy {pairs:.1%}"
        return [
            f"masked-token accuracy {self.masked_accuracy:.1%}{follows}; loss {self.loss:.4f}, perplexity "
            f"{self.perplexity:.3f} per masked token",
            f"{self.n_hidden:,} masked tokens; the text has {self.n_tokens:,} tokens, {self.n_bytes:,} bytes",
        ]
