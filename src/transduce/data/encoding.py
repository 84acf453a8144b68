"""Encode text and write it into stores, in bounded memory."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from transduce.config.settings import DataSettings
from transduce.data.clean import Cleaner, CleanReport
from transduce.data.cleaned_pairs import unpack_pairs
from transduce.data.corpus import Labelled, Pair, number_of
from transduce.data.examples import Ids
from transduce.data.leaks import LeakCheck, comparable, hash_of, key_of
from transduce.data.sentence_pairs import Packed, pack
from transduce.data.spool import Arrays, compressed, decompressed
from transduce.data.store import (
    AlignedStore,
    LabelStore,
    SentenceStore,
    StoreWriter,
    TextStore,
    TokenStore,
    join_sequences,
)
from transduce.data.text import Piece
from transduce.data.word_links import links_of_tokens, parse_links, whitespace_words
from transduce.data.workers import LocalWorkers, Workplace, compute
from transduce.errors import DataError
from transduce.text.special import BOS, EOS, Vocabulary
from transduce.text.tokenizer import Tokenizers

T = TypeVar("T")

_CHUNK = 10_000  # size of the records between two reports


def fingerprint_of(marks: Sequence[bytes], tokenizers: Tokenizers, *parts: str) -> str:
    """The sha256 of everything that decides what a store contains: text (`Source.mark`), vocabularies, and `parts`."""
    texts = (tokenizers.src.model, tokenizers.tgt.model, *map(str.encode, parts))
    return hashlib.sha256(b"".join([*marks, *(hashlib.sha256(text).digest() for text in texts)])).hexdigest()


@dataclass(frozen=True, slots=True)
class EncodePairs:
    """Encodes the pairs of a record (`data.cleaned_pairs`) and drops those of unsuitable length.

    without: sources that are held out. held_out: hashes of held-out sources, whose pairs are to be reported. aligned:
    with the links of the pairs.
    """

    tokenizers: Tokenizers
    settings: DataSettings
    without: frozenset[str] = frozenset()
    held_out: frozenset[bytes] = frozenset()
    aligned: bool = False

    @property
    def columns(self) -> dict[str, tuple[str, np.dtype[Any]]]:
        """The arrays of tokens of the store: the array of their offsets, and their type."""
        sides = {name: (f"{name}_offsets", getattr(self.tokenizers, name).stored_as) for name in ("src", "tgt")}
        return sides | ({"links": ("link_offsets", np.dtype(np.int32))} if self.aligned else {})

    def __call__(self, record: Arrays) -> Arrays:
        cleaner, hits, pairs = Cleaner(self.settings), list[tuple[str, str, str]](), list[Pair]()
        looks = bool(self.without or self.held_out)
        for pair in unpack_pairs(record):
            text = comparable(pair.src) if looks else ""
            if text not in self.without:
                pairs.append(pair)
                if self.held_out and hash_of(text) in self.held_out:
                    hits.append((pair.src, pair.tgt, pair.where))
        src, tgt = self.tokenizers.src, self.tokenizers.tgt
        src_ids, tgt_ids, links = list[Any](), list[Any](), list[list[int]]()
        for some in _chunks(pairs, min(src.chunk, tgt.chunk)):
            sides = src.encode_batch([pair.src for pair in some]), tgt.encode_batch([pair.tgt for pair in some])
            for pair, s, t in zip(some, *sides, strict=True):
                if cleaner.lengths_fit(pair, len(s), len(t)):
                    src_ids.append(s)
                    tgt_ids.append(t)
                    if self.aligned:
                        links.append(_token_links(pair, self.tokenizers))
        facts = {"report": cleaner.report.to_json(), "hits": hits}
        result = {"facts": compressed(json.dumps(facts))}
        for (name, (_, dtype)), sequences in zip(self.columns.items(), (src_ids, tgt_ids, links), strict=False):
            result[name], result[f"{name}_lengths"] = join_sequences(sequences, dtype)
        return result


def encode_pairs(
    folder: Path,
    corpora: Sequence[Iterable[Arrays]],
    function: EncodePairs,
    *,
    report: CleanReport,
    key: str = "",
    name: str = "training text",
    checks: Sequence[LeakCheck] = (),
    place: Workplace | None = None,
) -> TokenStore:
    """Encode the records of each corpus and write the store, an `AlignedStore` if the function keeps links.

    `report`: that of the cleaning so far. `key`: determines what is stored, for a resume. `checks`: take note of the
    pairs that the function looks for. Raises what reading the pairs raises, `DataError` where no pair is left (`name`
    says of what), `RunFolderError` where the disk is full.
    """

    def fill(writer: StoreWriter) -> None:
        found, sizes, records = copy.deepcopy(report), [0] * len(corpora), chain.from_iterable(corpora)
        for record, result in compute(function, records, workers, saved):
            facts = json.loads(decompressed(result["facts"]))
            found.include(facts["report"])
            for src, tgt, where in facts["hits"]:
                for check in checks:
                    check.note(key_of((src, tgt)), (src, tgt), where)
            for column, (offsets, _) in columns.items():
                writer.append_joined(column, offsets, result[column], result[f"{column}_lengths"])
            sizes[int(record["corpus"][0])] += len(result["src_lengths"])
        found.require_pairs(function.settings, name)
        writer.facts |= {"sizes": sizes, "cleaning": found.to_json()}

    place = place or Workplace(folder.parent, workers=LocalWorkers(1))
    workers = place.workers or LocalWorkers(function.settings.workers)
    saved = place.results("encoded", key, sorted(function.without), sorted(function.held_out))
    columns, dtypes = function.columns, dict[str, Any]()
    for column, (offsets, dtype) in columns.items():
        dtypes |= {column: dtype, offsets: np.int64}
    return (AlignedStore if function.aligned else TokenStore).create(folder, dtypes, fill)


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
        writer.facts |= {"documents": n_documents, "bytes": n_bytes}

    return TextStore.create(folder, {"ids": vocabulary.stored_as}, fill)


def encode_sentences(
    folder: Path | None,
    pieces: Iterable[Piece],
    vocabulary: Vocabulary,
    *,
    longest: int,
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
        writer.facts |= {"bytes": n_bytes}

    dtypes = {"ids": vocabulary.stored_as, "offsets": np.int64, "documents": np.int64}
    return SentenceStore.create(folder, dtypes, fill)


def encode_labelled(
    folder: Path,
    examples: Iterable[Labelled],
    labels: Sequence[str],
    vocabulary: Vocabulary,
    *,
    longest: int,
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
        writer.facts |= {"longest": n_cut}

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
    """Yield the records, and report their total size so far now and then and at the end."""
    total = reported = 0
    for record in records:
        yield record
        total += size_of(record)
        if total - reported >= _CHUNK:
            reported = total
            report(total)
    report(total)


def _chunks(records: Iterable[T], n: int) -> Iterator[list[T]]:
    records = iter(records)
    while chunk := list(islice(records, n)):
        yield chunk
