"""Pharaoh files, and links between tokens."""

from pathlib import Path

import numpy as np
import pytest

from text_runs import vocabulary
from transduce.config.settings import DataSettings
from transduce.data.batch import collate
from transduce.data.clean import Cleaner, CleanReport, pack_pairs
from transduce.data.encoding import EncodePairs, encode_pairs
from transduce.data.pairs import Pair
from transduce.data.reading import memory_source, with_links
from transduce.data.store import AlignedStore, Example
from transduce.data.word_links import (
    WordLink,
    format_links,
    links_of_tokens,
    n_words,
    parse_links,
    read_links,
    whitespace_words,
)
from transduce.errors import DataError
from transduce.text.tokenizer import Tokenizers


def test_possible_links_include_the_sure_ones() -> None:
    links = parse_links(" 0-1  2?3 4p0 ")
    assert links.sure == {WordLink(0, 1)}
    assert links.possible == {WordLink(0, 1), WordLink(2, 3), WordLink(4, 0)}
    assert format_links(links.possible) == "0-1 2-3 4-0"
    assert parse_links("") == (frozenset(), frozenset())


@pytest.mark.parametrize("line", ["0", "0-", "a-b", "0-1-2", "-1-0", "0:1", "1\u00b2-0", "0-99999999999"])
def test_malformed_links_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match="is not a link"):
        parse_links(f"0-0 {line}")


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ("0-0\n", ["the text has 2 lines", "links has 1: line 2"]),
        ("0-0\n0~0\n", ["links, line 2", "'0~0' is not a link"]),
        ("0-0\n0-2\n", ["links, line 2", "link 0-2", "1 and 1 words"]),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, lines: str, parts: list[str]) -> None:
    (tmp_path / "links").write_text(lines)
    with pytest.raises(DataError) as error:
        read_links(tmp_path / "links", ["a b", "c"], ["d e", "f"])
    assert all(part in str(error.value) for part in parts)


def test_links_travel_with_their_pairs_through_cleaning_and_encoding(tmp_path: Path) -> None:
    texts = [
        ("a man", "ein Mann"),
        ("", "nothing"),
        ("a dog", "ein Hund"),
        ("the \x01 dog", "der Hund"),
        ("a man", "x"),
    ]
    (tmp_path / "links").write_text("0-0 1-1\n\n1-1\n2-1\n1-0\n")
    source = memory_source("text", [Pair(*text, "text", n) for n, text in enumerate(texts, 1)])
    aligned = with_links(source, tmp_path / "links")
    assert aligned.mark() != source.mark()
    kept = list(filter(None, map(Cleaner(DataSettings()).by_rules, aligned.read())))
    assert [pair.links for pair in kept] == ["0-0 1-1", "1-1", "", "1-0"]  # of other words, none

    tokenizers = Tokenizers(vocabulary(), vocabulary())
    function = EncodePairs(tokenizers, DataSettings(), aligned=True)
    store = encode_pairs(tmp_path / "store", [pack_pairs(kept)], function, report=CleanReport(5))
    assert isinstance(store, AlignedStore) and len(store) == 4
    for i, pair in enumerate(kept):
        src, tgt = (whitespace_words(t, vocabulary().encode_with_offsets(t)[1])[0] for t in (pair.src, pair.tgt))
        assert store.links_of(i).tolist() == [
            list(x) for x in links_of_tokens(parse_links(pair.links).possible, src, tgt)
        ]
    assert len(store.links_of(2)) == 0


@pytest.mark.parametrize("lines", ["0-0\n", "0-0\n0-0\n0-0\n"])
def test_an_alignment_that_is_not_parallel_is_refused(tmp_path: Path, lines: str) -> None:
    (tmp_path / "links").write_text(lines)
    source = memory_source("text", [Pair("a", "b", "text", n) for n in (1, 2)])
    with pytest.raises(DataError, match=r"line [23] has no counterpart"):
        list(with_links(source, tmp_path / "links").read())


@pytest.mark.parametrize("text", ["", "  ", "a", " two\t words\n", "wide\u3000space and\u00a0this", "a\u200b b"])
def test_tokens_belong_to_the_words_between_ascii_white_space(text: str) -> None:
    words = [word.decode() for word in text.encode().split()]
    ids, places = vocabulary().encode_with_offsets(text)
    owners, spans = whitespace_words(text, places)
    assert [text[begin:end] for begin, end in spans] == words
    assert n_words(text) == len(words)
    assert len(owners) == len(ids)
    for owner, (begin, end) in zip(owners, places, strict=True):
        assert owner == -1 or text[begin:end].strip(" \t\n\u00a0\u3000\u200b") in words[owner]


def test_every_subword_of_a_word_is_linked_and_words_without_links_to_the_end() -> None:
    # words: [0 0] [1] | [0] [1 1] [2]
    found = links_of_tokens([WordLink(0, 1), WordLink(1, 1)], [0, 0, 1], [0, 1, 1, 2])
    assert found == [(3, 0), (0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2), (3, 3)]
    assert links_of_tokens([], [0], [0]) == []


def test_a_batch_links_the_step_that_reads_a_token_and_its_parts_keep_their_links() -> None:
    links = np.array([[1, 0], [2, 1]])  # source token, target token
    batch = collate([Example([5, 6], [7, 8], links), Example([5], [6]), Example([9], [9], np.array([[0, 0]]))])
    assert batch.links is not None
    assert batch.links.tolist() == [[0, 1, 1], [0, 2, 2], [2, 1, 0]]  # row, place in tgt_in, place in src
    part = batch.part(1, 3)
    assert part.links is not None and part.links.tolist() == [[1, 1, 0]]
    assert collate([Example([5], [6])]).links is None
