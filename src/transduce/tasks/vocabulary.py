"""Train the vocabulary of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from transduce.config import Settings, resolved
from transduce.errors import VocabularyTooSmall
from transduce.logging import Log
from transduce.text.tokenizer import Tokenizers
from transduce.text.training import train_tokenizers

Lines = Callable[[], tuple[Iterable[str], Iterable[str]]]
"""Yields the training text of both sides, from its start at each call; the second is empty if there is one side."""


def learn_vocabulary(lines: Lines, settings: Settings, log: Log, *, may_grow: bool) -> Tokenizers:
    """Train the vocabulary on the training text; with `may_grow`, a larger one if its characters need it."""
    size = resolved(settings.tokenizer.vocab_size, "tokenizer.vocab_size")
    try:
        found = train_tokenizers(*lines(), settings.tokenizer, vocab_size=size, seed=settings.training.seed)
    except VocabularyTooSmall as error:
        if not may_grow:
            raise
        size = error.needed + error.needed // 2
        log.say(f"the text has many different characters: the vocabulary grows to {size:,} pieces")
        return learn_vocabulary(lines, settings.with_values("tokenizer", vocab_size=size), log, may_grow=False)
    for note in found.notes:
        (log.say if may_grow else log.warn)(note)  # a given size that is not reached is worth a warning
    return found
