"""Encode text and write it into stores, in bounded memory."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from transduce.config import DataSettings
from transduce.data.arrays import StoreWriter, id_type, write_store
from transduce.data.clean import Cleaner, CleanReport
from transduce.data.corpus import Pair
from transduce.data.labelled import Labelled, number_of
from transduce.data.sentence_pairs import Packed, pack
from transduce.data.store import LabelStore, SentenceStore, TextStore, TokenStore
from transduce.data.text import Piece
from transduce.errors import DataError
from transduce.text.special import BOS, EOS, Vocabulary
from transduce.text.tokenizer import Tokenizers

T = TypeVar("T")

_CHUNK = 10_000  # records encoded at once

Progress = Callable[[int], object]
"""Called with the number of records, or of bytes, that have been encoded."""


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


def encode_pairs(
    folder: Path,
    corpora: Sequence[Iterable[Pair]],
    tokenizers: Tokenizers,
    settings: DataSettings,
    *,
    report: CleanReport,
    fingerprint: str = "",
    name: str = "training text",
    progress: Progress | None = None,
) -> TokenStore:
    """Encode the cleaned pairs of each corpus, drop those of unsuitable length, and write the store.

    `report`: that of the cleaning so far. Raises what reading the pairs raises, `DataError` where no pair is left
    (`name` says of what), `RunFolderError` where the disk is full.
    """
    cleaner, sizes, n_read = Cleaner(settings, copy.deepcopy(report)), list[int](), 0
    types = {"src": id_type(tokenizers.n_src), "src_offsets": np.int64}
    types |= {"tgt": id_type(tokenizers.n_tgt), "tgt_offsets": np.int64}
    with write_store(folder, **types) as writer:
        for pairs in corpora:
            sizes.append(0)
            for chunk in _chunks(pairs):
                sizes[-1] += _encode_chunk(chunk, tokenizers, cleaner, writer)
                n_read += len(chunk)
                if progress is not None:
                    progress(n_read)
        cleaner.report.require_pairs(settings, name)
        writer.facts |= {"fingerprint": fingerprint, "sizes": sizes, "cleaning": cleaner.report.to_json()}
    return TokenStore.open(folder)


def encode_text(
    folder: Path,
    pieces: Iterable[Piece],
    tokenizer: Vocabulary,
    *,
    fingerprint: str = "",
    name: str = "training text",
    progress: Progress | None = None,
) -> TextStore:
    """Encode documents and write the store. Raises `DataError` where there is no text (`name` says of what)."""
    counts = {"documents": 0, "bytes": 0}
    with write_store(folder, ids=id_type(tokenizer.vocab_size)) as writer:
        for ids in _framed(pieces, tokenizer, counts):
            writer.append("ids", ids)
            if progress is not None:
                progress(counts["bytes"])
        if not counts["bytes"]:
            raise DataError(f"{name}: no text found")
        writer.facts |= {"fingerprint": fingerprint, **counts}
    return TextStore.open(folder)


def text_in_memory(pieces: Iterable[Piece], tokenizer: Vocabulary) -> TextStore:
    """Encode documents into a store in memory."""
    counts = {"documents": 0, "bytes": 0}
    parts = [np.asarray(ids, dtype=np.int32) for ids in _framed(pieces, tokenizer, counts)]
    return TextStore(np.concatenate([np.zeros(0, dtype=np.int32), *parts]), counts)


def encode_sentences(
    folder: Path,
    pieces: Iterable[Piece],
    vocabulary: Vocabulary,
    *,
    longest: int,
    fingerprint: str = "",
    name: str = "training text",
) -> SentenceStore:
    """Encode documents line by line and write the store.

    Blank lines are skipped, lines of more than `longest` tokens are split into equal parts. Raises `DataError` where
    there is no text.
    """
    n_sentences = n_bytes = 0
    types = {"ids": id_type(vocabulary.vocab_size), "offsets": np.int64, "documents": np.int64}
    with write_store(folder, **types) as writer:
        writer.append("documents", [0])
        for sentences, ends, size in _sentences(pieces, vocabulary, longest):
            writer.append_sequences("ids", "offsets", sentences)
            writer.append("documents", ends)
            n_sentences, n_bytes = n_sentences + len(sentences), n_bytes + size
        if not n_sentences:
            raise DataError(f"{name}: no text found")
        writer.facts |= {"kind": "sentences, 1", "fingerprint": fingerprint, "bytes": n_bytes}
    return SentenceStore.open(folder)


def sentences_in_memory(pieces: Iterable[Piece], vocabulary: Vocabulary, *, longest: int, name: str) -> SentenceStore:
    """Encode documents as `encode_sentences` does, into a store in memory."""
    sentences, documents, n_bytes = list[Sequence[int]](), [0], 0
    for more, ends, size in _sentences(pieces, vocabulary, longest):
        sentences += more
        documents += ends
        n_bytes += size
    if not sentences:
        raise DataError(f"{name}: no text found")
    ids = np.fromiter(chain.from_iterable(sentences), dtype=id_type(vocabulary.vocab_size))
    offsets = np.concatenate(([0], np.cumsum([len(one) for one in sentences], dtype=np.int64)))
    return SentenceStore(ids, offsets, np.array(documents, dtype=np.int64), {"bytes": n_bytes})


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
    n_cut = n = 0
    types = {"ids": id_type(vocabulary.vocab_size), "offsets": np.int64, "seconds": np.int32, "labels": np.int32}
    with write_store(folder, **types) as writer:
        for chunk in _chunks(examples):
            writer.append("labels", [number_of(example, labels) for example in chunk])
            packed = pack_texts([example.texts for example in chunk], vocabulary, longest=longest)
            writer.append_sequences("ids", "offsets", [one.ids for one in packed])
            writer.append("seconds", [len(one.ids) - int(one.segments.sum()) for one in packed])
            n_cut += sum(len(one.ids) >= longest for one in packed)
            n += len(chunk)
        if not n:
            raise DataError(f"{name}: no text found")
        writer.facts |= {"kind": "labelled texts, 1", "fingerprint": fingerprint, "longest": n_cut}
    return LabelStore.open(folder)


def pack_texts(texts: Sequence[tuple[str, ...]], vocabulary: Vocabulary, *, longest: int) -> list[Packed]:
    """Encode texts, or pairs of texts, as a model reads them, cut to `longest` tokens, the longer text first."""
    sides = [vocabulary.encode_batch(list(side)) for side in zip(*texts, strict=True)]
    return [_cut(list(ids), longest) for ids in zip(*sides, strict=True)]


def _sha256(head: str, parts: Sequence[bytes], extra: Sequence[str]) -> str:
    total = hashlib.sha256(head.encode())
    for part in (*parts, *(hashlib.sha256(text.encode()).digest() for text in extra)):
        total.update(part)
    return total.hexdigest()


def _chunks(records: Iterable[T]) -> Iterator[list[T]]:
    records = iter(records)
    while chunk := list(islice(records, _CHUNK)):
        yield chunk


def _encode_chunk(chunk: list[Pair], tokenizers: Tokenizers, cleaner: Cleaner, writer: StoreWriter) -> int:
    """Encode pairs, drop those of unsuitable length, write the rest; how many these are."""
    src_ids = tokenizers.src.encode_batch([pair.src for pair in chunk])
    tgt_ids = tokenizers.tgt.encode_batch([pair.tgt for pair in chunk])
    fits = [cleaner.lengths_fit(p, len(s), len(t)) for p, s, t in zip(chunk, src_ids, tgt_ids, strict=True)]
    for name, ids in (("src", src_ids), ("tgt", tgt_ids)):
        writer.append_sequences(name, f"{name}_offsets", [one for one, fit in zip(ids, fits, strict=True) if fit])
    return sum(fits)


def _framed(pieces: Iterable[Piece], tokenizer: Vocabulary, counts: dict[str, int]) -> Iterator[list[int]]:
    """The ids of documents with BOS and EOS, chunk by chunk; counts documents and bytes."""
    begins = True
    for chunk in _chunks(pieces):
        framed: list[int] = []
        for piece, ids in zip(chunk, tokenizer.encode_batch([piece.text for piece in chunk]), strict=True):
            if begins:
                framed.append(BOS)
            framed += ids
            begins = piece.ends
            counts["bytes"] += len(piece.text.encode("utf-8"))
            if piece.ends:
                framed.append(EOS)
                counts["documents"] += 1
        yield framed


def _sentences(
    pieces: Iterable[Piece], vocabulary: Vocabulary, longest: int
) -> Iterator[tuple[list[Sequence[int]], list[int], int]]:
    """Chunk by chunk: sentences, how many sentences there are up to the end of each document, and bytes of text."""
    n = ended = 0
    for chunk in _chunks(pieces):
        sentences, ends = list[Sequence[int]](), list[int]()
        for piece, ids in zip(chunk, vocabulary.encode_batch([piece.text.strip() for piece in chunk]), strict=True):
            n_parts = -(-len(ids) // longest)
            cut = n_parts > 1
            sentences += [part.tolist() for part in np.array_split(np.array(ids), n_parts)] if cut else [ids] * n_parts
            n += n_parts
            if piece.ends and ended < n:
                ended = n
                ends.append(n)
        yield sentences, ends, sum(len(piece.text.encode("utf-8")) for piece in chunk)
    if ended < n:
        yield [], [n], 0


def _cut(sides: Sequence[Sequence[int]], longest: int) -> Packed:
    room = longest - 1 - len(sides)
    lengths = [len(side) for side in sides]
    while sum(lengths) > room:  # half of the excess at a time, so that long texts are cut quickly
        longer = max(range(len(lengths)), key=lambda i: lengths[i])
        lengths[longer] -= max(1, (sum(lengths) - room) // 2)
    return pack(*(side[:n] for side, n in zip(sides, lengths, strict=True)))
