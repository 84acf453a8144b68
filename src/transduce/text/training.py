"""Learn a vocabulary. The result is deterministic; a large text is sampled.

SentencePiece normalizes text by rules that it stores in the model. A run's exports therefore normalize as the run does,
and offsets lead back to the text as it was written. The rules have SentencePiece's names, except for `nfc`, which only
composes characters (canonically) and never changes the visible text. `identity` does so too, and keeps all spaces.
"""

from __future__ import annotations

import io
import math
import random
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, islice, permutations
from typing import Any, Generic, TypeVar

import sentencepiece

from transduce.config.settings import Direction, Normalization, TokenizerSettings
from transduce.errors import DataError, SettingsError, VocabularyTooSmall, message_of
from transduce.text.languages import ENTITY, normalize_code
from transduce.text.placeholders import PLACEHOLDERS
from transduce.text.special import MASK_PIECE, SPACE, Framing
from transduce.text.tokenizer import BOS, EOS, PAD, UNK, Tokenizer, Tokenizers, parse_model, with_pieces

T = TypeVar("T")

SPELLING = "\u200c\u200e\u200f\u061c"
"""The zero-width non-joiner of Persian, and direction marks, which the rule nmt_nfkc would replace by spaces.

If a text contains them, they become separate pieces, which SentencePiece does not normalize.
"""

_SPELLING = re.compile(f"([{SPELLING}])")


SAMPLE_LINES = 1_000_000
"""Maximum number of lines to learn a vocabulary from. A longer text is sampled at random."""

_EXACT: dict[str, Any] = {
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "byte_fallback": True,
}
"""Options for exact vocabularies."""

_NORMALIZED: dict[str, Any] = {"normalization_rule_name": "identity", "remove_extra_whitespaces": True}
"""Options for text that is already normalized; the rules are put into the model afterwards."""

_THREADS = 8  # fixed for any number of cores, because sums depend on the number of threads
_LINES_AT_ONCE = 10_000  # lines offered to a sample per call
_LEARNABLE = 5  # fewest occurrences with which a character is always in a translator's vocabulary
_USUAL_ENTITY = 20  # fewest occurrences with which an HTML entity is a piece of the vocabulary
_PIECES_PER_ENTITY = 32  # fewest pieces of a vocabulary for each HTML entity that is a piece
_RARE = 0.0005  # largest share of the text's characters that are spelled in bytes
_ROOM_FOR_BYTES = 1024  # smallest size of a vocabulary with pieces for the 256 bytes
_NEVER_WRITTEN = "\ufffd"  # replacement character of invalid UTF-8
_LONGEST = 500  # most characters per sentence for the trainer, whose time can grow with the square


def train_tokenizer(lines: Iterable[str], settings: TokenizerSettings, *, vocab_size: int) -> Tokenizer:
    """Learn a vocabulary of `vocab_size` pieces, special ones included, from lines of text, which are kept in memory.

    If the text is too small for this size, the vocabulary gets the largest possible size. Raises `DataError` if there
    is no text, and `SettingsError` if the characters alone need a larger vocabulary.
    """
    if settings.exact:
        return Tokenizer(_train(list(lines), settings, vocab_size, symbols=["\n"], **_EXACT))
    lines = list(normalized(lines, settings.normalization))
    model = _train(lines, settings, vocab_size, symbols=_symbols_in(lines, vocab_size), **_NORMALIZED)
    return Tokenizer(_with_normalization(model, settings.normalization))


def train_tokenizers(
    src_lines: Iterable[str], tgt_lines: Iterable[str], settings: TokenizerSettings, *, vocab_size: int
) -> Tokenizers:
    """Learn the vocabularies of a translator: the same pieces for both sides if `settings.joint`, else separate pieces.

    Each side has its own normalization. Characters that are too rare to learn are spelled in bytes, so that a target
    can contain them. The source's vocabulary does not read characters that are rare in the source. If there is no
    target text, both sides share a vocabulary with all characters of the source.
    """
    src_lines, tgt_lines = list(src_lines), list(tgt_lines)
    if not tgt_lines:
        alone = train_tokenizer(src_lines, settings, vocab_size=vocab_size)
        return Tokenizers(alone, alone)
    rules = settings.normalization, settings.tgt_normalization
    sides = [list(normalized(lines, rule)) for lines, rule in zip((src_lines, tgt_lines), rules, strict=True)]
    alphabets = [_learnable(Counter(chain.from_iterable(side))) for side in sides]
    if settings.joint:
        models = [_train_side(list(chain(*sides)), alphabets[0] | alphabets[1], settings, vocab_size)] * 2
    else:
        pairs = zip(sides, alphabets, strict=True)
        models = [_train_side(lines, alphabet, settings, vocab_size) for lines, alphabet in pairs]
    src, tgt = (_with_normalization(model, rule) for model, rule in zip(models, rules, strict=True))
    src = _reading_only(src, alphabets[0], _count_entities(sides[0]))
    written = Tokenizer(tgt)
    return Tokenizers(written if src == tgt else Tokenizer(src), written)


SOURCE_FRAMES: dict[str, tuple[str, ...]] = {"none": (), "tag": ("tgt",), "tags": ("src", "tgt")}
"""The language tokens that begin a source, for each value of `data.languages`. See `Framing`."""


def with_language_tokens(
    tokenizers: Tokenizers, directions: Sequence[Direction], *, src: tuple[str, ...]
) -> Tokenizers:
    """Append a control piece such as <2de> for each language (Johnson et al. 2017, section 3).

    If the vocabularies are separate, only the source's gets the pieces. `src`: the tokens that begin a source text, as
    in `Framing`.
    """
    codes = language_codes(directions)
    known = {*tokenizers.src.pieces(range(tokenizers.n_src)), *tokenizers.tgt.pieces(range(tokenizers.n_tgt))}
    pieces = [(f"<2{code}>" if f"<2{code}>" not in known else f"<<2{code}>>", 0.0) for code in codes]
    trained = [(normalize_code(src), normalize_code(tgt)) for src, tgt in directions]
    ids = range(tokenizers.n_src, tokenizers.n_src + len(codes))
    framing = Framing(dict(zip(codes, ids, strict=True)), src, (), tuple(dict.fromkeys(trained)))
    read = Tokenizer(with_pieces(tokenizers.src.model, pieces, control=True)).with_framing(framing)
    if tokenizers.src is tokenizers.tgt:
        return Tokenizers(read, read)
    if not tokenizers.joint:
        return Tokenizers(read, tokenizers.tgt)
    written = Tokenizer(with_pieces(tokenizers.tgt.model, pieces, control=True)).with_framing(framing)
    return Tokenizers(read, written)


def language_codes(directions: Iterable[Direction]) -> list[str]:
    """The usual codes of all languages in these directions, each once, in order of appearance.

    >>> language_codes([("en", "deu"), ("de", "EN"), ("en", "pt_BR")])
    ['en', 'de', 'pt-br']
    """
    return list(dict.fromkeys(normalize_code(code) for direction in directions for code in direction))


def _train_side(lines: list[str], alphabet: Collection[str], settings: TokenizerSettings, vocab_size: int) -> bytes:
    """Train on normalized lines. Characters outside the alphabet are spelled in bytes if `vocab_size` is sufficient."""
    rare = set(chain.from_iterable(lines)).difference(alphabet)
    if _NEVER_WRITTEN in rare:
        lines = [line.replace(_NEVER_WRITTEN, " ") for line in lines]
    spells = bool(rare or settings.character_coverage < 1) and vocab_size >= _ROOM_FOR_BYTES
    if spells and rare:
        spaces = dict.fromkeys(map(ord, rare), " ")
        lines = [line.translate(spaces) for line in lines]
    return _train(
        lines,
        settings,
        vocab_size,
        symbols=[*PLACEHOLDERS[: settings.placeholders or 0], *_symbols_in(lines, vocab_size)],
        **_NORMALIZED,
        byte_fallback=spells or settings.character_coverage < 1,
    )


def _symbols_in(lines: Sequence[str], vocab_size: int) -> list[str]:
    """Strings in the text that become one piece each: characters of `SPELLING` and the most frequent HTML entities."""
    counts = _count_entities(lines).items()
    frequent = sorted((-count, entity) for entity, count in counts if count >= _USUAL_ENTITY)
    entities = sorted(entity for _, entity in frequent[: vocab_size // _PIECES_PER_ENTITY])
    return [character for character in SPELLING if any(character in line for line in lines)] + entities


def _count_entities(lines: Iterable[str]) -> Counter[str]:
    return Counter(chain.from_iterable(ENTITY.findall(line) for line in lines if "&" in line))


def _train(
    lines: list[str], settings: TokenizerSettings, vocab_size: int, *, symbols: Sequence[str], **options: Any
) -> bytes:
    """Train a SentencePiece model and return it serialized. `options`: further options of its trainer."""
    if settings.kind in ("marian", "hub"):
        raise SettingsError(
            f"tokenizer.kind = '{settings.kind}' comes with an imported model; to train: unigram, bpe or char"
        )
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=parts_of(lines),  # a list, as the trainer wraps errors of an iterator
            model_writer=written,
            model_type=settings.kind,
            vocab_size=vocab_size,
            hard_vocab_limit=False,  # allow fewer pieces for small text
            character_coverage=settings.character_coverage,
            user_defined_symbols=[MASK_PIECE] * settings.mask + list(symbols),  # listed in the order of their ids
            pad_id=PAD,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            max_sentence_length=1 << 30,  # nothing is skipped
            num_threads=_THREADS,
            minloglevel=2,
            **options,
        )
    except RuntimeError as error:
        raise _explained(error, settings, vocab_size) from None
    return written.getvalue()


def _learnable(counts: Counter[str]) -> set[str]:
    """The characters of a text that are frequent enough to learn."""
    rare, room = {_NEVER_WRITTEN}, _RARE * counts.total()
    for character, count in sorted(counts.items(), key=lambda item: (item[1], item[0])):
        room -= count
        if count >= _LEARNABLE or room < 0:
            break
        rare.add(character)
    return set(counts) - rare


def _with_normalization(model: bytes, rule: Normalization) -> bytes:
    """Set the normalization rules of a model. All rules except `identity` also collapse spaces and strip the edges."""
    proto = parse_model(model)
    spec = proto.normalizer_spec
    spec.ParseFromString(_normalizer(rule).serialized_normalizer_spec())
    spec.name, spec.add_dummy_prefix, spec.escape_whitespaces = rule, True, True
    spec.remove_extra_whitespaces = rule != "identity"
    return bytes(proto.SerializeToString())


def _reading_only(model: bytes, alphabet: Collection[str], entities: Counter[str]) -> bytes:
    """Restrict a model to an alphabet and to HTML entities that are not rare. Other pieces keep their ids, but encoding
    never yields them.
    """
    proto, readable = parse_model(model), {*alphabet, SPACE, " "}
    for piece in proto.pieces:
        if piece.type == piece.NORMAL:
            is_read = readable.issuperset(piece.piece)
        else:  # the target alone may have made an entity a piece
            is_read = not ENTITY.fullmatch(piece.piece) or entities[piece.piece] >= _LEARNABLE
        if not is_read:
            piece.type = piece.UNUSED
    return bytes(proto.SerializeToString())


def normalized(lines: Iterable[str], name: Normalization) -> Iterator[str]:
    """Normalize lines by the rule `name`, but keep their spaces."""
    normalize = _normalizer(name).Normalize
    for line in lines:
        parts = _SPELLING.split(line)
        yield "".join(part if part in SPELLING else normalize(part) for part in parts)


@cache
def _normalizer(name: Normalization) -> Any:
    sentencepiece.set_min_log_level(2)
    rules = {"norm_map": _canonical_rules()} if name in ("nfc", "identity") else {"rule_name": name}
    return sentencepiece.SentencePieceNormalizer(
        **rules, add_dummy_prefix=False, escape_whitespaces=False, remove_extra_whitespaces=False
    )


def _canonical_rules() -> list[tuple[str, str]]:
    """List sequences of a letter and diacritics, in any order and partly composed or not, with their NFC form."""
    rules = dict[str, str]()
    for character in map(chr, [*range(1, 0xD800), *range(0xE000, 0x110000)]):
        letter, *marks = list(unicodedata.normalize("NFD", character))
        if letter == character:
            continue
        result = unicodedata.normalize("NFC", character)
        if result != character:
            rules[character] = result
        for order in permutations(marks) if all(map(unicodedata.combining, marks)) else [marks]:
            for n in range(len(marks)):
                sequence = unicodedata.normalize("NFC", letter + "".join(order[:n])) + "".join(order[n:])
                if sequence != result and unicodedata.normalize("NFC", sequence) == result:
                    rules[sequence] = result
    return list(rules.items())


class Reservoir(Generic[T]):
    """A random sample of at most `n` items from a stream of any length (Li 1994, algorithm L).

    The sample depends only on the items and the seed. A stream of at most `n` items is kept completely, in order.
    """

    def __init__(self, n: int, *, seed: int) -> None:
        self.items: list[T] = []
        self._n, self._seen, self._draw = n, 0, random.Random(seed)
        # Equivalent to giving each item a random key and keeping the items with the lowest keys.
        self._largest_key, self._next = 1.0, n - 1
        self._skip()

    def add(self, item: T) -> None:
        self.add_some(1, lambda _: item)

    def add_some(self, n: int, item_of: Callable[[int], T]) -> None:
        """Offer `n` more items. `item_of` creates an item from its index, and is called only for chosen items."""
        room = min(n, max(0, self._n - self._seen))
        self.items.extend(map(item_of, range(room)))
        while self._next < self._seen + n:
            self.items[self._draw.randrange(self._n)] = item_of(self._next - self._seen)
            self._skip()
        self._seen += n

    def _skip(self) -> None:
        """Draw the index of the next item to take once the sample is full."""
        self._largest_key *= (1 - self._draw.random()) ** (1 / self._n)
        key = min(self._largest_key, 1 - sys.float_info.epsilon)  # the key may have been rounded to 1
        self._next += 1 + int(math.log(1 - self._draw.random()) / math.log1p(-key))


def sample_of(lines: Iterable[str], n: int, *, seed: int) -> list[str]:
    reservoir, lines = Reservoir[str](n, seed=seed), iter(lines)
    while some := list(islice(lines, _LINES_AT_ONCE)):
        reservoir.add_some(len(some), some.__getitem__)
    return reservoir.items


def parts_of(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines, cut into parts of at most 500 characters, at a space if possible."""
    for line in lines:
        start = 0
        while len(line) - start > _LONGEST:
            end = line.rfind(" ", start + _LONGEST // 2, start + _LONGEST) + 1 or start + _LONGEST
            yield line[start:end]
            start = end
        yield line[start:]


def _explained(error: RuntimeError, settings: TokenizerSettings, vocab_size: int) -> Exception:
    """Convert an error of SentencePiece's trainer to one that tells the user how to correct it."""
    text = message_of(error)
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", text):
        return VocabularyTooSmall(
            f"tokenizer.vocab_size = {vocab_size}: the characters of the text alone need {match[1]}; "
            f"raise it, or lower tokenizer.character_coverage ({settings.character_coverage:g})",
            needed=int(match[1]),
        )
    if "sentences_.empty()" in text or "all_chars_count" in text:
        return DataError("there is no text to learn a vocabulary from: every line is empty")
    return DataError(f"SentencePiece could not learn a vocabulary: {text}")
