"""Extend a vocabulary by pieces learned from new text. The old pieces keep their ids.

First the missing characters are appended, the most frequent first. Then the text is split with the old vocabulary, and
the most frequent pair of neighbors within a word is merged into a new piece, repeatedly. This is byte-pair encoding
(Sennrich et al. 2016) that continues from the old vocabulary. Every new piece therefore consists of known pieces, and
text without new pieces is split exactly as before.
"""

from __future__ import annotations

import heapq
import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise

import sentencepiece

from transduce.errors import SettingsError
from transduce.text.languages import find_language, script
from transduce.text.special import SPACE, Vocabulary, characters
from transduce.text.tokenizer import (
    PieceTokenizer,
    SentencePieceVocabulary,
    Tokenizer,
    Tokenizers,
    parse_model,
    with_pieces,
)
from transduce.text.training import sample_of

SAMPLE_LINES = 100_000
"""Maximum number of lines to learn new pieces from. A longer text is sampled at random."""

_LEAST = 5  # fewest occurrences of a pair that becomes a piece
_LONGEST = 16  # maximum characters of a piece, as in SentencePiece
_ABOVE = 0.01  # minimum difference between the score of a new piece and the sum of its parts' scores

Parts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NewPiece:
    """A piece to append to a vocabulary. `made_of`: the pieces that it merges; empty for a single character.

    `score`: its score in the SentencePiece model, or None if the model already contains the piece.
    """

    text: str
    score: float | None
    made_of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Extended:
    """Extended vocabularies. `src` and `tgt`: for each new id of a side, in order, the old ids that it replaces.

    A new character replaces the ids of its bytes, or nothing if the vocabulary has no byte pieces.
    """

    tokenizers: Tokenizers
    src: tuple[Parts, ...]
    tgt: tuple[Parts, ...]


def extend(tokenizers: Tokenizers, src: Iterable[str], tgt: Iterable[str], *, n: int) -> Extended:
    """Add up to `n` pieces to each vocabulary, learned from source and target lines. `tgt` may be empty.

    If both sides share one list of pieces, as in Marian's models, each side learns half of the new pieces.
    Raises `SettingsError` for a vocabulary that cannot be extended.
    """
    if tokenizers.joint:
        src = list(src)
        if isinstance(tokenizers.src, Tokenizer) and tokenizers.src is not tokenizers.tgt:
            src = list(map(tokenizers.src.normalized, src))
        learned = _learned(tokenizers.tgt, chain(src, tgt), n)
        written, parts = _extended(tokenizers.tgt, learned, listed=learned)
        if tokenizers.is_one:
            return Extended(Tokenizers(written, written), parts, parts)
        read, _ = _extended(tokenizers.src, learned, listed=learned)
        return Extended(Tokenizers(_reading(read, src), written), parts, parts)
    n_each = n // 2 if (share_list := _share_list(tokenizers)) else n
    of_src, of_tgt = _learned(tokenizers.src, src, n_each), _learned(tokenizers.tgt, tgt, n_each)
    listed = (of_src + of_tgt,) * 2 if share_list else (of_src, of_tgt)
    new_src, src_parts = _extended(tokenizers.src, of_src, listed=listed[0])
    new_tgt, tgt_parts = _extended(tokenizers.tgt, of_tgt, listed=listed[1])
    return Extended(Tokenizers(new_src, new_tgt), src_parts, tgt_parts)


def add_language(extended: Extended, code: str, *, like: str) -> Extended:
    """Append a token for the language `code`, initialized from the token of the language `like`.

    Raises `SettingsError` if the vocabulary has no tokens for languages, already has the language, or lacks `like`.
    """
    old, name = extended.tokenizers, "training.new_language"
    languages = old.src.framing.languages
    if not languages:
        raise SettingsError(f"{name}: the vocabulary has no tokens for languages; leave it out", name)
    if code in languages:
        raise SettingsError(f"{name}.code = '{code}': the model already has this language; leave {name} out", name)
    known = find_language(like, languages, name=f"{name}.like")
    (token,) = old.src.pieces([languages[known]])
    token, parts = token.replace(known, code), ((languages[known],),)
    src = old.src.with_language(token, code)
    if not (old.is_one or old.tgt.framing.languages):  # only sources have the tokens
        return Extended(Tokenizers(src, old.tgt), (*extended.src, *parts), extended.tgt)
    tgt = src if old.is_one else old.tgt.with_language(token, code)
    return Extended(Tokenizers(src, tgt), (*extended.src, *parts), (*extended.tgt, *parts))


def new_pieces(old: Vocabulary, new: Vocabulary) -> list[str]:
    return new.pieces(range(old.vocab_size, new.vocab_size))


def _reading(vocabulary: Vocabulary, lines: Iterable[str]) -> Vocabulary:
    """Allow the source vocabulary to use its unused pieces whose characters are frequent in these lines."""
    proto = parse_model(vocabulary.model)
    counts = Counter(chain.from_iterable(lines))
    readable = {c for c, count in counts.items() if count >= _LEAST}
    readable.update(*(piece.piece for piece in proto.pieces if piece.type == piece.NORMAL))
    for piece in proto.pieces:
        if piece.type == piece.UNUSED and readable.issuperset(piece.piece):
            piece.type = piece.NORMAL
    return Tokenizer(bytes(proto.SerializeToString())).with_framing(vocabulary.framing)


def _share_list(tokenizers: Tokenizers) -> bool:
    """Whether both sides have tokenizers of Marian's kind with the same list of pieces."""
    both = tokenizers.src, tokenizers.tgt
    src, tgt = (side.pieces(range(side.vocab_size)) for side in both)
    return all(isinstance(side, PieceTokenizer) for side in both) and src == tgt


def _extended(
    vocabulary: Vocabulary, own: Sequence[NewPiece], *, listed: Sequence[NewPiece]
) -> tuple[Vocabulary, tuple[Parts, ...]]:
    """Append the `listed` pieces, and return the old ids of each. Encoding produces only `own` and old pieces."""
    pieces = vocabulary.pieces(range(vocabulary.vocab_size))
    known = {piece: i for i, piece in enumerate(pieces)}
    old_ids: dict[str, Parts] = {}
    for piece in listed:
        if piece.text not in known and piece.text not in old_ids:
            parts = [old_ids[p] if p in old_ids else (known[p],) for p in piece.made_of if p in old_ids or p in known]
            old_ids[piece.text] = tuple(chain.from_iterable(parts)) or _bytes_of(piece.text, known)
    model = with_pieces(vocabulary.model, [(piece.text, piece.score) for piece in own if piece.score is not None])
    has_list = isinstance(vocabulary, PieceTokenizer)
    extended = PieceTokenizer(model, [*pieces, *old_ids]) if has_list else Tokenizer(model)
    return extended.with_framing(vocabulary.framing), tuple(old_ids.values())


def _bytes_of(text: str, known: Mapping[str, int]) -> Parts:
    """The ids of a text's UTF-8 bytes; empty if the vocabulary `known` lacks byte pieces."""
    names = [f"<0x{byte:02X}>" for byte in text.encode("utf-8")]
    return tuple(known[name] for name in names) if all(name in known for name in names) else ()


def _learned(vocabulary: Vocabulary, lines: Iterable[str], n: int) -> list[NewPiece]:
    """Learn up to `n` new pieces: missing characters first, then merges of frequent pairs."""
    if not isinstance(vocabulary, SentencePieceVocabulary):
        raise SettingsError(
            "tokenizer.extend: a vocabulary of the tokenizers library (as BERT's and GPT-2's) stays as it came",
            "tokenizer.extend",
        )
    sample = [characters(line) for line in sample_of(lines, SAMPLE_LINES, seed=0)]
    sp = sentencepiece.SentencePieceProcessor(model_proto=vocabulary.model)
    known = {sp.id_to_piece(i): sp.get_score(i) for i in range(sp.vocab_size())}
    kind, lowest = vocabulary.algorithm, min(known.values())
    lacking = Counter(c for line in sample for c in sp.normalize(line) if c not in known).most_common(n)
    whole = with_pieces(vocabulary.model, [(c, lowest) for c, _ in lacking])
    sp = sentencepiece.SentencePieceProcessor(model_proto=whole)
    words = Counter(chain.from_iterable(_words(pieces) for pieces in sp.encode(sample, out_type=str)))
    # Marian's tokenizers list the pieces that have ids separately.
    listed = set(vocabulary.pieces(range(vocabulary.vocab_size)))
    unlisted = [NewPiece(text, None) for text in sorted({p for word in words for p in word if p in known} - listed)]
    room = max(0, n - len(lacking) - len(unlisted))
    joined = Joined() if kind == "char" else _join(words, room, known=known.keys())
    if kind == "unigram":
        return (unlisted + _as_unigram([c for c, _ in lacking], joined, words, known))[:n]
    made = [NewPiece(c, lowest - 1) for c, _ in lacking]
    made += [NewPiece(text, lowest - 2 - i, pair) for i, (text, (pair, _)) in enumerate(joined.items())]
    return (unlisted + made)[:n]


Words = Counter[tuple[str, ...]]
Joined = dict[str, tuple[tuple[str, str], int]]


def _as_unigram(lacking: Sequence[str], joined: Joined, words: Words, known: Mapping[str, float]) -> list[NewPiece]:
    """Score new pieces by their log-probabilities, and drop pieces that are rare outside longer new pieces.

    The score of a piece always exceeds the sum of its parts' scores, so that encoding uses the piece.
    """
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for piece in word:
            counts[piece] += count
    for text, (pair, count) in joined.items():
        counts[text] += count
        for part in pair:
            counts[part] -= count
    total = max(1, sum(counts.values()))
    scores = dict(known) | {c: math.log(max(1, counts[c]) / total) for c in lacking}
    pieces, made = [NewPiece(c, scores[c]) for c in lacking], dict[str, tuple[str, ...]]()
    for text, (pair, _) in joined.items():
        own = math.log(max(1, counts[text]) / total)
        scores[text] = max(own, sum(scores[part] for part in pair) + _ABOVE)
        made[text] = tuple(chain.from_iterable(made.get(part, (part,)) for part in pair))
        if counts[text] >= _LEAST:
            pieces.append(NewPiece(text, scores[text], made[text]))
    return pieces


def _words(pieces: Sequence[str]) -> list[tuple[str, ...]]:
    starts = [0, *(i for i, piece in enumerate(pieces) if i and piece.startswith(SPACE)), len(pieces)]
    return [tuple(pieces[a:b]) for a, b in pairwise(starts) if a < b]


def _join(words: Words, n: int, *, known: Iterable[str]) -> Joined:
    """Merge the most frequent pair of neighbors up to `n` times. Returns the new pieces with their pairs and counts."""
    old, made = set(known), Joined()
    texts, counts = [list(word) for word in words], list(words.values())
    meetings: Counter[tuple[str, str]] = Counter()
    where: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for i, word in enumerate(texts):
        for pair in pairwise(word):
            meetings[pair] += counts[i]
            where[pair].add(i)
    queue = [(-count, pair) for pair, count in meetings.items() if count >= _LEAST and _may_join(*pair, old)]
    heapq.heapify(queue)
    while queue and len(made) < n:
        count, pair = heapq.heappop(queue)
        if -count != meetings[pair]:  # the count has changed since
            if meetings[pair] >= _LEAST:
                heapq.heappush(queue, (-meetings[pair], pair))
            continue
        made.setdefault("".join(pair), (pair, -count))
        changes: Counter[tuple[str, str]] = Counter()
        for i in where.pop(pair):
            before = texts[i]
            texts[i] = after = _merged(before, pair)
            for other in pairwise(before):
                changes[other] -= counts[i]
            for other in pairwise(after):
                changes[other] += counts[i]
                where[other].add(i)
        for other, change in changes.items():
            meetings[other] += change
            if change > 0 and meetings[other] >= _LEAST and _may_join(*other, old):
                heapq.heappush(queue, (-meetings[other], other))
    return made


def _merged(word: Sequence[str], pair: tuple[str, str]) -> list[str]:
    pieces, i = [], 0
    while i < len(word):
        together = tuple(word[i : i + 2]) == pair
        pieces.append("".join(pair) if together else word[i])
        i += 1 + together
    return pieces


def _may_join(a: str, b: str, old: set[str]) -> bool:
    """Whether two neighboring pieces may merge: they have letters of one script, and the result is short and new."""
    left, right = _script(a.removeprefix(SPACE)), _script(b)
    return bool(right) and left in ("", right) and len(a) + len(b) <= _LONGEST and a + b not in old


@lru_cache(maxsize=1 << 16)
def _script(text: str) -> str | None:
    """The script of a text's letters; empty for an empty text; None for mixed scripts, digits or punctuation."""
    if not text:
        return ""
    scripts = {script(c) for c in text if not unicodedata.category(c).startswith("M")}
    scripts = {"Han" if name == "Kana" else name for name in scripts}  # a Japanese word has both
    return (scripts.pop() or None) if len(scripts) == 1 else None
