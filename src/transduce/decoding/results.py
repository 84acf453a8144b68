"""What a translator hands back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """One output for a line. `log_prob`: nats, the end of the sentence counted; `score`: what the search ranks by.

    `finished` is False where the output was cut off at the length limit.
    """

    text: str
    ids: tuple[int, ...]
    log_prob: float
    score: float
    finished: bool = True


@dataclass(frozen=True, slots=True)
class Translation:
    """What became of a line: candidates, best first (samples: in the order drawn), and what the user should know."""

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
        """Whether the best candidate came to its end."""
        return self.candidates[0].finished


@dataclass(frozen=True, slots=True)
class Score:
    """How likely the model finds a given translation: nats, token by token; the last is the end of the sentence."""

    token_log_probs: tuple[float, ...]

    @property
    def log_prob(self) -> float:
        """Sum over the tokens."""
        return sum(self.token_log_probs)

    @property
    def n_tokens(self) -> int:
        """Tokens, the end of the sentence counted."""
        return len(self.token_log_probs)
