"""Learn a vocabulary, deterministically, from a sample if the text is large."""

from __future__ import annotations

import io
import math
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, Generic, TypeVar

import sentencepiece

from transduce.config.settings import TokenizerSettings
from transduce.errors import DataError, SettingsError, VocabularyTooSmall, message_of
from transduce.text.special import MASK_PIECE
from transduce.text.tokenizer import BOS, EOS, PAD, UNK, Tokenizer, Tokenizers

T = TypeVar("T")

SAMPLE_LINES = 1_000_000
"""Maximum number of lines that a vocabulary is learned from; a random sample of longer text."""

_EXACT: dict[str, Any] = {
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "byte_fallback": True,
}
"""Options for exact vocabularies."""

_THREADS = 8  # on any number of cores, because the sums depend on the number of threads
_LINES_AT_ONCE = 10_000  # offered to a sample per call
_LONGEST = 500  # characters given to the trainer as one sentence: its time can grow with their square


def train_tokenizer(lines: Iterable[str], settings: TokenizerSettings, *, vocab_size: int) -> Tokenizer:
    """Learn a vocabulary of `vocab_size` pieces, special ones included, from lines of text, which are kept in memory.

    A size beyond what the text supports becomes the largest possible one. Raises `DataError` where there is no text,
    and `SettingsError` where the characters alone need a larger vocabulary.
    """
    if settings.kind in ("marian", "hub"):
        raise SettingsError(
            f"tokenizer.kind = '{settings.kind}' comes with an imported model; to train: unigram, bpe or char"
        )
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=parts_of(list(lines)),  # at once, as the trainer wraps errors of an iterator
            model_writer=written,
            model_type=settings.kind,
            vocab_size=vocab_size,
            hard_vocab_limit=False,  # fewer pieces where the text has no more
            character_coverage=settings.character_coverage,
            **(_EXACT if settings.exact else {"normalization_rule_name": settings.normalization}),
            user_defined_symbols=[MASK_PIECE] * settings.mask + ["\n"] * settings.exact,  # in the order of their ids
            pad_id=PAD,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            max_sentence_length=1 << 30,  # nothing is skipped
            num_threads=_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explained(error, settings, vocab_size) from None
    return Tokenizer(written.getvalue())


def train_tokenizers(
    src_lines: Iterable[str], tgt_lines: Iterable[str], settings: TokenizerSettings, *, vocab_size: int
) -> Tokenizers:
    """Learn the vocabularies of both sides: one for both where `settings.joint`, else one each of `vocab_size`."""
    if settings.joint:
        both = train_tokenizer(chain(src_lines, tgt_lines), settings, vocab_size=vocab_size)
        return Tokenizers(both, both)
    src, tgt = (train_tokenizer(lines, settings, vocab_size=vocab_size) for lines in (src_lines, tgt_lines))
    return Tokenizers(src, tgt)


class Reservoir(Generic[T]):
    """A random sample of at most `n` items from a stream of any length (Li 1994, algorithm L).

    The sample is a function of the items and the seed. With at most `n` items it is all of them, in order.
    """

    def __init__(self, n: int, *, seed: int) -> None:
        self.items: list[T] = []
        self._n, self._seen, self._draw = n, 0, random.Random(seed)
        # As if each item had a random key, and the sample were the items with the lowest keys.
        self._largest_key, self._next = 1.0, n - 1
        self._skip()

    def add(self, item: T) -> None:
        """Offer one more item."""
        self.add_some(1, lambda _: item)

    def add_some(self, n: int, item_of: Callable[[int], T]) -> None:
        """Offer `n` more items, of which only those that are taken are made."""
        room = min(n, max(0, self._n - self._seen))
        self.items.extend(map(item_of, range(room)))
        while self._next < self._seen + n:
            self.items[self._draw.randrange(self._n)] = item_of(self._next - self._seen)
            self._skip()
        self._seen += n

    def _skip(self) -> None:
        """Draw which item is taken next once the sample is full."""
        self._largest_key *= (1 - self._draw.random()) ** (1 / self._n)
        key = min(self._largest_key, 1 - sys.float_info.epsilon)  # it may have been rounded to 1
        self._next += 1 + int(math.log(1 - self._draw.random()) / math.log1p(-key))


def sample_of(lines: Iterable[str], n: int, *, seed: int) -> list[str]:
    """A random sample of at most `n` lines."""
    reservoir, lines = Reservoir[str](n, seed=seed), iter(lines)
    while some := list(islice(lines, _LINES_AT_ONCE)):
        reservoir.add_some(len(some), some.__getitem__)
    return reservoir.items


def parts_of(lines: Iterable[str]) -> Iterator[str]:
    """The lines, long ones in parts: cut at a space where one is near, so that no word is lost to the vocabulary."""
    for line in lines:
        while len(line) > _LONGEST:
            cut = line.rfind(" ", _LONGEST // 2, _LONGEST) + 1 or _LONGEST
            yield line[:cut]
            line = line[cut:]
        yield line


def _explained(error: RuntimeError, settings: TokenizerSettings, vocab_size: int) -> Exception:
    """The trainer's failure, as something that the user can act on."""
    text = message_of(error)
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", text):
        return VocabularyTooSmall(
            f"tokenizer.vocab_size = {vocab_size}: the characters of the text alone need {found[1]}; "
            f"raise it, or lower tokenizer.character_coverage ({settings.character_coverage:g})",
            needed=int(found[1]),
        )
    if "sentences_.empty()" in text or "all_chars_count" in text:
        return DataError("there is no text to learn a vocabulary from: every line is empty")
    return DataError(f"SentencePiece could not learn a vocabulary: {text}")
