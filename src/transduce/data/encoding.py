"""Encode text and write it into stores, in bounded memory."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from transduce.config.settings import DataSettings, Direction
from transduce.data.clean import Cleaner, CleanReport, reverse_pair, split_record, unpack_pairs
from transduce.data.copies import CaseCopies, Copies
from transduce.data.leaks import LeakCheck, comparable, hash_of, key_of
from transduce.data.pairs import Pair
from transduce.data.reading import Labelled, Piece, number_of
from transduce.data.store import (
    AlignedStore,
    LabelStore,
    SentenceStore,
    StoreWriter,
    TextStore,
    TokenStore,
    join_sequences,
    pack_texts,
)
from transduce.data.word_links import links_of_tokens, parse_links, whitespace_words
from transduce.data.workers import Arrays, Workplace, batched, compressed, compute, decompressed
from transduce.errors import DataError
from transduce.text.special import BOS, EOS, Vocabulary
from transduce.text.tokenizer import Tokenizers

T = TypeVar("T")

_CHUNK = 10_000  # total size of the records between two reports of progress


@dataclass(frozen=True, slots=True)
class EncodePairs:
    """Encodes the pairs of a record (`pack_pairs`) and drops pairs of unsuitable length.

    directions: Languages of each corpus, for vocabularies with language tokens. first_reversed: Number of the first
    corpus whose pairs are encoded from target to source. without: Sources to leave out, as `comparable` returns them.
    held_out: Hashes of held-out sources; pairs with such a source are reported as leaks. aligned: Store the word links
    of the pairs. copies: Puts placeholders into some pairs. case: Adds copies of some pairs, which are not reported.
    """

    tokenizers: Tokenizers
    settings: DataSettings
    directions: Sequence[Direction] = ()
    first_reversed: int = sys.maxsize
    without: frozenset[str] = frozenset()
    held_out: frozenset[bytes] = frozenset()
    aligned: bool = False
    copies: Copies | None = None
    case: CaseCopies | None = None

    @property
    def columns(self) -> dict[str, tuple[str, np.dtype[Any]]]:
        """For each array of tokens in the store, the name of its offsets array and its dtype."""
        sides = {name: (f"{name}_offsets", getattr(self.tokenizers, name).stored_as) for name in ("src", "tgt")}
        return sides | ({"links": ("link_offsets", np.dtype(np.int32))} if self.aligned else {})

    def __call__(self, record: Arrays) -> Arrays:
        number, hits, pairs = int(record["corpus"][0]), list[tuple[str, str, str]](), list[Pair]()
        cleaner, is_reversed = Cleaner(self.settings), number >= self.first_reversed
        for pair in unpack_pairs(record):
            if self.without and comparable(pair.src) in self.without:
                continue
            if is_reversed:
                pair = reverse_pair(pair)
            pairs.append(pair)
            if self.held_out and hash_of(comparable(pair.src)) in self.held_out:
                hits.append((pair.src, pair.tgt, pair.where))
        cleaners = [cleaner] * len(pairs)
        if self.case is not None:
            case = replace(self.case, languages=self.directions[number]) if self.directions else self.case
            pairs += list(filter(None, map(case.copy_of, pairs)))
            cleaners += [Cleaner(self.settings)] * (len(pairs) - len(cleaners))
        sides = self._encoded(pairs)
        if self.copies is not None:
            self._put_placeholders(pairs, *sides)
        tokenizers = self.tokenizers.between(*self.directions[number]) if self.directions else self.tokenizers
        framed = list(map(tokenizers.src.framed, sides[0])), list(map(tokenizers.tgt.framed, sides[1]))
        src_ids, tgt_ids, links = list[Any](), list[Any](), list[list[int]]()
        for pair, encoded_src, encoded_tgt, own in zip(pairs, *framed, cleaners, strict=True):
            if own.lengths_fit(pair, len(encoded_src), len(encoded_tgt)):
                src_ids.append(encoded_src)
                tgt_ids.append(encoded_tgt)
                if self.aligned:
                    links.append(_token_links(pair, tokenizers))
        report = CleanReport() if is_reversed else cleaner.report  # reversed pairs have already been counted
        facts = {"report": report.to_json(), "hits": hits}
        result = {"facts": compressed(json.dumps(facts))}
        for (name, (_, dtype)), sequences in zip(self.columns.items(), (src_ids, tgt_ids, links), strict=False):
            result[name], result[f"{name}_lengths"] = join_sequences(sequences, dtype)
        return result

    def _encoded(self, pairs: Sequence[Pair]) -> tuple[list[list[int]], list[list[int]]]:
        """Encode both sides of the pairs, without language tokens."""
        src, tgt = (side.with_frame(()) for side in (self.tokenizers.src, self.tokenizers.tgt))
        return src.encode_batch([pair.src for pair in pairs]), tgt.encode_batch([pair.tgt for pair in pairs])

    def _put_placeholders(self, pairs: list[Pair], src_ids: list[list[int]], tgt_ids: list[list[int]]) -> None:
        """Put placeholders into some pairs, and encode these pairs again."""
        assert self.copies is not None
        new_pairs = map(self.copies.masked, pairs, src_ids)
        masked = {i: new for i, (new, pair) in enumerate(zip(new_pairs, pairs, strict=True)) if new is not pair}
        sides = self._encoded([*masked.values()])
        for (i, pair), new_src, new_tgt in zip(masked.items(), *sides, strict=True):
            pairs[i], src_ids[i], tgt_ids[i] = pair, new_src, new_tgt


def encode_pairs(
    folder: Path,
    corpora: Sequence[Iterable[Arrays]],
    function: EncodePairs,
    *,
    report: CleanReport,
    key: str = "",
    name: str = "training text",
    checks: Sequence[LeakCheck] = (),
    workplace: Workplace | None = None,
) -> TokenStore:
    """Encode the records of each corpus and write a `TokenStore`, or an `AlignedStore` if `function.aligned`.

    `report`: the report of the cleaning so far. `key`: identifies the encoded text, to resume after a kill. `checks`:
    receive the pairs with held-out sources. Raises `DataError` if no pair of the text `name` is left, `RunFolderError`
    if the disk is full.
    """
    workplace = workplace or Workplace(folder.parent, n_workers=1)

    def fill(writer: StoreWriter) -> None:
        total, sizes = copy.deepcopy(report), [0] * len(corpora)
        n = min(function.tokenizers.src.chunk, function.tokenizers.tgt.chunk)
        records = (part for record in chain.from_iterable(corpora) for part in split_record(record, n))
        for record, result in compute(function, records, saved, n_workers=workplace.n_workers):
            facts = json.loads(decompressed(result["facts"]))
            total.include(facts["report"])
            for src, tgt, where in facts["hits"]:
                for check in checks:
                    check.note(key_of((src, tgt)), (src, tgt), where)
            for column, (offsets, _) in columns.items():
                writer.append_joined(column, offsets, result[column], result[f"{column}_lengths"])
            sizes[int(record["corpus"][0])] += len(result["src_lengths"])
        total.require_pairs(function.settings, name)
        writer.facts |= {"sizes": sizes, "cleaning": total.to_json()}

    saved = workplace.results("encoded", key, sorted(function.without), sorted(function.held_out))
    columns, dtypes = function.columns, dict[str, Any]()
    for column, (offsets, dtype) in columns.items():
        dtypes |= {column: dtype, offsets: np.int64}
    return (AlignedStore if function.aligned else TokenStore).create(folder, dtypes, fill)


def _token_links(pair: Pair, tokenizers: Tokenizers) -> list[int]:
    """Convert the word links of a pair to token links: source and target position of each link in turn."""
    words = []
    for vocabulary, text in ((tokenizers.src, pair.src), (tokenizers.tgt, pair.tgt)):
        ids, spans = vocabulary.encode_with_offsets(text)
        n_frame = vocabulary.n_frame(ids)
        words.append([-1] * n_frame + whitespace_words(text, spans[n_frame:])[0])
    return [token for link in links_of_tokens(parse_links(pair.links).possible, *words) for token in link]


def encode_text(
    folder: Path | None,
    pieces: Iterable[Piece],
    vocabulary: Vocabulary,
    *,
    name: str = "training text",
) -> TextStore:
    """Encode documents, each between BOS and EOS, and write a store. `folder`: None to keep it in memory.

    Raises `DataError` if the text `name` is empty.
    """

    def fill(writer: StoreWriter) -> None:
        n_documents, n_bytes, begins = 0, 0, True
        for chunk in batched(pieces, vocabulary.chunk):
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
    """Encode documents line by line and write a store. `folder`: None to keep it in memory.

    Blank lines are skipped, and lines of more than `longest` tokens are split into equal parts. Raises `DataError` if
    there is no text.
    """

    def fill(writer: StoreWriter) -> None:
        n = ended = n_bytes = 0  # all sentences, and sentences in finished documents
        writer.append("documents", [0])
        for chunk in batched(pieces, vocabulary.chunk):
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
    """Encode labelled texts, cut at `longest` tokens, and write a store. Raises `DataError` for unknown labels."""

    def fill(writer: StoreWriter) -> None:
        n_cut = n = 0
        for chunk in batched(examples, vocabulary.chunk):
            writer.append("labels", [number_of(example, labels) for example in chunk])
            packed = pack_texts([example.texts for example in chunk], vocabulary, longest=longest)
            writer.append_sequences("ids", "offsets", [example.ids for example in packed])
            writer.append("seconds", [len(example.ids) - int(example.segments.sum()) for example in packed])
            n_cut += sum(len(example.ids) >= longest for example in packed)
            n += len(chunk)
        if not n:
            raise DataError(f"{name}: no text found")
        writer.facts |= {"longest": n_cut}

    dtypes = {"ids": vocabulary.stored_as, "offsets": np.int64, "seconds": np.int32, "labels": np.int32}
    return LabelStore.create(folder, dtypes, fill)


def counted(
    records: Iterable[T], report: Callable[[int], object], size_of: Callable[[T], int] = lambda _: 1
) -> Iterator[T]:
    """Yield the records unchanged, and `report` their total size so far periodically and at the end."""
    total = reported = 0
    for record in records:
        yield record
        total += size_of(record)
        if total - reported >= _CHUNK:
            reported = total
            report(total)
    report(total)
