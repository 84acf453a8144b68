"""Results of translators, generators and masked language models."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np

from transduce.errors import listed
from transduce.logging import Log
from transduce.text.languages import DIGITS, with_ascii_digits
from transduce.text.placeholders import Masked
from transduce.text.sentences import joined_parts
from transduce.text.special import Vocabulary

Style = Literal["text", "scores", "nbest", "json"]
MAX_NOTES = 5
"""Maximum number of notes on single lines that are printed; further notes are only counted."""
MOST_SHOWN = 8  # items listed in a note
_NUMBER, _LONG_NUMBER = re.compile(DIGITS), re.compile(r"\d{3}")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One output for a line. `log_prob`: nats, with the end of the sentence; `score`: value by which the search ranks.

    If the model would leave out a part that must be kept, both values count the part as at least `MISPLACED` times as
    probable as the end of the sentence: see `decoding.constraints`. For several sentences, `log_prob` is the sum and
    `score` the mean. `finished` is False if the output was cut off at the length limit. `attention`: see `Hypothesis`.
    """

    text: str
    ids: tuple[int, ...]
    log_prob: float
    score: float
    finished: bool = True
    attention: np.ndarray | None = field(default=None, compare=False, repr=False)


def distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Keep the first candidate of each text: several token sequences may spell one text."""
    texts = [candidate.text for candidate in candidates]
    return [candidate for rank, candidate in enumerate(candidates) if candidate.text not in texts[:rank]]


def joined_note(sentences: Iterable[Translation]) -> str:
    """Join the different notes on sentences; empty if there are none."""
    return "; ".join(dict.fromkeys(sentence.note for sentence in sentences if sentence.note))


@dataclass(frozen=True, slots=True)
class Translation:
    """The translation of a line: candidates and a note for the user.

    The candidates of a search have different texts, best first; unfinished candidates come last, whatever their score.
    Samples are in the order drawn.

    sentences: the separately translated sentences of a line that was split; else empty.
    """

    candidates: tuple[Candidate, ...]
    note: str = ""
    sentences: tuple[TranslatedSentence, ...] = ()

    @classmethod
    def join(cls, parts: Sequence[str], sentences: Sequence[Translation]) -> Translation:
        """Join the translations of sentences to the translation of a text. `parts`: see `split_sentences`.

        Candidate i joins the i-th candidates of all sentences; a sentence with fewer contributes its last one.
        """

        def texts_of(candidates: Sequence[Candidate]) -> list[str]:
            return joined_parts([candidate.text for candidate in candidates], parts)

        ranks = range(max(len(sentence.candidates) for sentence in sentences))
        rows = [[s.candidates[min(rank, len(s.candidates) - 1)] for s in sentences] for rank in ranks]
        n_sentences = max(1, sum(map(bool, parts[::2])))  # empty sentences have the score 0 and are not counted
        candidates = [
            Candidate(
                "".join(texts_of(row)),
                tuple(i for candidate in row for i in candidate.ids),
                sum(candidate.log_prob for candidate in row),
                sum(candidate.score for candidate in row) / n_sentences,
                all(candidate.finished for candidate in row),
            )
            for row in rows
        ]
        starts = [[*accumulate(map(len, texts), initial=0)][:-1:2] for texts in (parts, texts_of(rows[0]))]
        return cls(
            tuple(candidates),
            joined_note(sentences),
            tuple(part for part in map(TranslatedSentence, parts[::2], sentences, *starts) if part.text),
        )

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

    def to_json(self) -> dict[str, Any]:
        names = ("text", "log_prob", "score", "finished")
        candidates = [{name: getattr(candidate, name) for name in names} for candidate in self.candidates]
        return {"text": self.text, "candidates": candidates, **({"note": self.note} if self.note else {})}


class TranslatedSentence(NamedTuple):
    """A sentence, its translation, and their character offsets in the line and in the line's translation."""

    text: str
    translation: Translation
    src_start: int
    tgt_start: int


class Note(NamedTuple):
    """A note on line `number` of a text. `lost`: a sentence of the line has no translation."""

    number: int
    text: str
    lost: bool


def note_on(style: Style, number: int, src: str, translation: Translation) -> Note | None:
    """The note to print for line `number`. None without a note, or for JSON output, which contains the note itself."""
    if not translation.note or style == "json":
        return None
    noted = [sentence.translation for sentence in translation.sentences] or [translation]
    return Note(number, translation.note, bool(src.strip()) and not all(part.text for part in noted if part.note))


def notes_on_source(masked: Masked, vocabulary: Vocabulary) -> list[str]:
    """Write notes on words of a source that the vocabulary cannot read, and on dropped characters."""
    kept = ", kept as written" if vocabulary.has_placeholders or not masked.text else ""
    dropped = [f"U+{ord(character):04X}" for character in masked.dropped]
    parts_of_note = {f"not in the vocabulary{kept}": list(dict.fromkeys(masked.unreadable)), "dropped": dropped}
    return [f"{problem}: {listed(parts, MOST_SHOWN)}" for problem, parts in parts_of_note.items() if parts]


def lost_numbers(src: str, tgt: str) -> list[str]:
    """Find numbers of three or more digits in `src` that the translation `tgt` lacks.

    Separators, the script of the digits, and the order of the parts of a date may differ.
    """
    if not _LONG_NUMBER.search(src):
        return []
    written = {digits for number in _NUMBER.findall(tgt) for digits in _digits_of(number)}
    lost = list[str]()
    for number in _NUMBER.findall(src):
        digits, *groups = _digits_of(number)
        if digits not in written and any(len(group) > 2 and group not in written for group in groups):
            lost.append(number)
    return lost


def _digits_of(number: str) -> list[str]:
    """All digits of a number as one string, then each group between separators, in ASCII digits."""
    groups = re.findall(r"\d+", with_ascii_digits(number))
    return ["".join(groups), *groups]


class Notes:
    """Prints notes as warnings: the first `most`, and each note on a lost translation. Finally prints their number."""

    def __init__(self, log: Log, *, most: int = MAX_NOTES) -> None:
        self._log, self._most, self._n = log, most, 0

    def show(self, note: Note, *, file: str = "") -> None:
        """Print a note as a warning, unless the limit is reached and nothing is lost. `file`: prefix."""
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
    """Format the output for line `number` of a text: `n_best` rows in style "nbest", one row in other styles.

    Line ends inside a text become spaces, so that every row is one line.
    """
    if style == "json":
        rows = [json.dumps({"line": number, "src": src, **translation.to_json()}, ensure_ascii=False)]
    elif style == "nbest":
        rows = [f"{number}\t{candidate.score:.4f}\t{candidate.text}" for candidate in translation.candidates]
        rows += [rows[-1]] * (n_best - len(rows))  # every line gets the same number of rows
    elif style == "scores":
        rows = [f"{translation.score:.4f}\t{translation.text}"]
    else:
        rows = [translation.text]
    return [row.replace("\r", " ").replace("\n", " ") for row in rows]


@dataclass(frozen=True, slots=True)
class TextLogProbs:
    """Log-probability (nats) of each token of a given text; the last value is for the end of the text."""

    token_log_probs: tuple[float, ...]

    @property
    def log_prob(self) -> float:
        return sum(self.token_log_probs)

    @property
    def n_tokens(self) -> int:
        """Number of tokens, including the end."""
        return len(self.token_log_probs)


@dataclass(frozen=True, slots=True)
class Generation:
    """The continuation of a prompt. `text`, `ids`: the new part; `log_prob`: nats, before temperature, top-k and top-p.

    `finished` is False if the text was cut off at the length limit.
    """

    prompt: str
    text: str
    ids: tuple[int, ...]
    log_prob: float
    finished: bool = True


@dataclass(frozen=True, slots=True)
class TextScore:
    """The loss on running text: `nats` summed over `n_tokens` in rows of `context` tokens, of which `stride` are new.

    `n_bytes`: size of the text in UTF-8. `memory`: number of remembered tokens, if the model has a memory.
    """

    nats: float
    n_tokens: int
    n_bytes: int
    context: int
    stride: int
    memory: int | None = None

    @property
    def nll(self) -> float:
        """Nats per token; ends of documents count as tokens."""
        return self.nats / self.n_tokens

    @property
    def perplexity(self) -> float:
        """exp(nats per token). Depends on the vocabulary."""
        return math.exp(min(self.nll, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text. Does not depend on the vocabulary."""
        return self.nats / math.log(2) / self.n_bytes

    def to_json(self) -> dict[str, float]:
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
    """The loss on `n_hidden` masked tokens of a text with `n_tokens` tokens and `n_bytes` bytes.

    `nll`: nats per masked token. `loss`: the training loss, which adds the loss on sentence pairs if the model predicts
    next sentences. Accuracies are fractions; next-sentence accuracy is None without pairs.
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
        """exp(nats per masked token). Depends on the vocabulary."""
        return math.exp(min(self.nll, 700.0))

    def to_json(self) -> dict[str, float]:
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
        pairs = self.next_sentence_accuracy
        follows = "" if pairs is None else f", next-sentence accuracy {pairs:.1%}"
        return [
            f"masked-token accuracy {self.masked_accuracy:.1%}{follows}; loss {self.loss:.4f}, perplexity "
            f"{self.perplexity:.3f} per masked token",
            f"{self.n_hidden:,} masked tokens; the text has {self.n_tokens:,} tokens, {self.n_bytes:,} bytes",
        ]
