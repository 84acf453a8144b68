"""Encode text and write it into stores, in bounded memory."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from transduce.config.settings import DataSettings
from transduce.data.clean import Cleaner, CleanReport
from transduce.data.corpus import Labelled, Pair, number_of
from transduce.data.examples import Ids
from transduce.data.sentence_pairs import Packed, pack
from transduce.data.store import AlignedStore, LabelStore, SentenceStore, StoreWriter, TextStore, TokenStore
from transduce.data.text import Piece
from transduce.data.word_links import links_of_tokens, parse_links, whitespace_words
from transduce.errors import DataError
from transduce.text.special import BOS, EOS, Vocabulary
from transduce.text.tokenizer import Tokenizers

T = TypeVar("T")

_CHUNK = 10_000  # records between two reports


def fingerprint_of_pairs(digests: Sequence[bytes], settings: DataSettings, tokenizers: Tokenizers, *extra: str) -> str:
    """The sha256 of everything that decides what a store of pairs contains: text, cleaning and vocabularies.

    `digests`: of the sources (`Source.digest`). `extra`: whatever else decides which pairs are stored.
    """
    keys = ("src_lang", "tgt_lang", "max_length", "max_ratio", "deduplicate", "drop_copies")
    parts = [f"{key}={getattr(settings, key)!r}\n".encode() for key in keys]
    parts += [hashlib.sha256(model).digest() for model in (tokenizers.src.model, tokenizers.tgt.model)]
    return _sha256("transduce token store 1\n", [*parts, *digests], extra)


def fingerprint_of_text(digests: Sequence[bytes], tokenizer: Vocabulary, *extra: str) -> str:
    """The sha256 of everything that decides what a store of one-sided text contains."""
    return _sha256("transduce text store 1\n", [hashlib.sha256(tokenizer.model).digest(), *digests], extra)


def _sha256(head: str, parts: Sequence[bytes], extra: Sequence[str]) -> str:
    hashed = (hashlib.sha256(text.encode()).digest() for text in extra)
    return hashlib.sha256(b"".join([head.encode(), *parts, *hashed])).hexdigest()


def encode_pairs(
    folder: Path,
    corpora: Sequence[Iterable[Pair]],
    tokenizers: Tokenizers,
    settings: DataSettings,
    *,
    report: CleanReport,
    fingerprint: str = "",
    name: str = "training text",
    aligned: bool = False,
) -> TokenStore:
    """Encode the cleaned pairs of each corpus, drop those of unsuitable length, and write the store.

    `report`: that of the cleaning so far. `aligned`: store the pairs' links too, in an `AlignedStore`. Raises what
    reading the pairs raises, `DataError` where no pair is left (`name` says of what), `RunFolderError` where the disk
    is full.
    """

    def fill(writer: StoreWriter) -> None:
        cleaner, sizes = Cleaner(settings, copy.deepcopy(report)), list[int]()
        for pairs in corpora:
            sizes.append(0)
            for chunk in _chunks(pairs, min(tokenizers.src.chunk, tokenizers.tgt.chunk)):
                src_ids = tokenizers.src.encode_batch([pair.src for pair in chunk])
                tgt_ids = tokenizers.tgt.encode_batch([pair.tgt for pair in chunk])
                fits = [cleaner.lengths_fit(p, len(s), len(t)) for p, s, t in zip(chunk, src_ids, tgt_ids, strict=True)]
                writer.append_sequences("src", "src_offsets", [s for s, fit in zip(src_ids, fits, strict=True) if fit])
                writer.append_sequences("tgt", "tgt_offsets", [t for t, fit in zip(tgt_ids, fits, strict=True) if fit])
                if aligned:
                    links = [_token_links(pair, tokenizers) for pair, fit in zip(chunk, fits, strict=True) if fit]
                    writer.append_sequences("links", "link_offsets", links)
                sizes[-1] += sum(fits)
        cleaner.report.require_pairs(settings, name)
        writer.facts |= {"fingerprint": fingerprint, "sizes": sizes, "cleaning": cleaner.report.to_json()}

    dtypes = {"src": tokenizers.src.stored_as, "src_offsets": np.int64}
    dtypes |= {"tgt": tokenizers.tgt.stored_as, "tgt_offsets": np.int64}
    if aligned:
        return AlignedStore.create(folder, dtypes | {"links": np.int32, "link_offsets": np.int64}, fill)
    return TokenStore.create(folder, dtypes, fill)


def _token_links(pair: Pair, tokenizers: Tokenizers) -> list[int]:
    """The links between the tokens of a pair, as an `AlignedStore` has them."""
    texts, vocabularies = (pair.src, pair.tgt), (tokenizers.src, tokenizers.tgt)
    places = (vocabulary.encode_with_offsets(text)[1] for vocabulary, text in zip(vocabularies, texts, strict=True))
    words = [whitespace_words(text, place)[0] for text, place in zip(texts, places, strict=True)]
    return [token for link in links_of_tokens(parse_links(pair.links).possible, *words) for token in link]


def encode_text(
    folder: Path | None,
    pieces: Iterable[Piece],
    vocabulary: Vocabulary,
    *,
    fingerprint: str = "",
    name: str = "training text",
) -> TextStore:
    """Encode documents, each between BOS and EOS, and write the store. `folder`: None to keep it in memory.

    Raises `DataError` where there is no text (`name` says of what).
    """

    def fill(writer: StoreWriter) -> None:
        n_documents, n_bytes, begins = 0, 0, True
        for chunk in _chunks(pieces, vocabulary.chunk):
            framed: list[int] = []
            for piece, ids in zip(chunk, vocabulary.encode_batch([piece.text for piece in chunk]), strict=True):
                framed += [BOS] * begins + ids + [EOS] * piece.ends
                begins = piece.ends
                n_documents += piece.ends
                n_bytes += len(piece.text.encode("utf-8"))
            writer.append("ids", framed)
        if not n_bytes:
            raise DataError(f"{name}: no text found")
        writer.facts |= {"fingerprint": fingerprint, "documents": n_documents, "bytes": n_bytes}

    return TextStore.create(folder, {"ids": vocabulary.stored_as}, fill)


def encode_sentences(
    folder: Path | None,
    pieces: Iterable[Piece],
    vocabulary: Vocabulary,
    *,
    longest: int,
    fingerprint: str = "",
    name: str = "training text",
) -> SentenceStore:
    """Encode documents line by line and write the store. `folder`: None to keep it in memory.

    Blank lines are skipped, lines of more than `longest` tokens are split into equal parts. Raises `DataError` where
    there is no text.
    """

    def fill(writer: StoreWriter) -> None:
        n = ended = n_bytes = 0  # sentences, those in documents that have ended
        writer.append("documents", [0])
        for chunk in _chunks(pieces, vocabulary.chunk):
            sentences, ends = list[Sequence[int]](), list[int]()
            for piece, ids in zip(chunk, vocabulary.encode_batch([piece.text.strip() for piece in chunk]), strict=True):
                n_parts = -(-len(ids) // longest)
                cut = n_parts > 1
                parts = [part.tolist() for part in np.array_split(np.array(ids), n_parts)] if cut else [ids] * n_parts
                sentences += parts
                n += n_parts
                n_bytes += len(piece.text.encode("utf-8"))
                if piece.ends and ended < n:
                    ends.append(ended := n)
            writer.append_sequences("ids", "offsets", sentences)
            writer.append("documents", ends)
        if ended < n:
            writer.append("documents", [n])
        if not n:
            raise DataError(f"{name}: no text found")
        writer.facts |= {"kind": "sentences, 1", "fingerprint": fingerprint, "bytes": n_bytes}

    dtypes = {"ids": vocabulary.stored_as, "offsets": np.int64, "documents": np.int64}
    return SentenceStore.create(folder, dtypes, fill)


def encode_labelled(
    folder: Path,
    examples: Iterable[Labelled],
    labels: Sequence[str],
    vocabulary: Vocabulary,
    *,
    longest: int,
    fingerprint: str = "",
    name: str = "training text",
) -> LabelStore:
    """Encode labelled texts, cut at `longest` tokens, and write the store. Raises `DataError` for unknown labels."""

    def fill(writer: StoreWriter) -> None:
        n_cut = n = 0
        for chunk in _chunks(examples, vocabulary.chunk):
            writer.append("labels", [number_of(example, labels) for example in chunk])
            packed = pack_texts([example.texts for example in chunk], vocabulary, longest=longest)
            writer.append_sequences("ids", "offsets", [one.ids for one in packed])
            writer.append("seconds", [len(one.ids) - int(one.segments.sum()) for one in packed])
            n_cut += sum(len(one.ids) >= longest for one in packed)
            n += len(chunk)
        if not n:
            raise DataError(f"{name}: no text found")
        writer.facts |= {"kind": "labelled texts, 1", "fingerprint": fingerprint, "longest": n_cut}

    dtypes = {"ids": vocabulary.stored_as, "offsets": np.int64, "seconds": np.int32, "labels": np.int32}
    return LabelStore.create(folder, dtypes, fill)


def pack_texts(texts: Sequence[tuple[str, ...]], vocabulary: Vocabulary, *, longest: int) -> list[Packed]:
    """Encode texts, or pairs of texts, as a model reads them, cut to `longest` tokens, the longer text first.

    Sequences of vectors get no special tokens.
    """
    sides = [vocabulary.encode_batch(list(side)) for side in zip(*texts, strict=True)]
    return [_cut(ids, longest) for ids in zip(*sides, strict=True)]


def _cut(sides: Sequence[Ids], longest: int) -> Packed:
    lengths = [len(side) for side in sides]
    room = longest - len(pack(*(side[:0] for side in sides)).ids)  # without the special tokens
    while sum(lengths) > room:  # half of the excess at a time, so that long texts are cut quickly
        longer = max(range(len(lengths)), key=lambda i: lengths[i])
        lengths[longer] -= max(1, (sum(lengths) - room) // 2)
    return pack(*(side[:n] for side, n in zip(sides, lengths, strict=True)))


def counted(
    records: Iterable[T], report: Callable[[int], object], size_of: Callable[[T], int] = lambda _: 1
) -> Iterator[T]:
    """Yield the records, and report their total size so far every few thousand of them and at the end."""
    total = 0
    for number, record in enumerate(records, 1):
        yield record
        total += size_of(record)
        if number % _CHUNK == 0:
            report(total)
    report(total)


def _chunks(records: Iterable[T], n: int) -> Iterator[list[T]]:
    records = iter(records)
    while chunk := list(islice(records, n)):
        yield chunk
