"""Pairs from every format, with file and line; malformed files are refused with file and line."""

from __future__ import annotations

import gzip
import json
import pickle
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from transduce.config.settings import Corpus, Settings
from transduce.data.check_sample import take_sample
from transduce.data.corpus import (
    PAIR_FORMATS,
    Pair,
    PairColumns,
    columns_of,
    corpus_files,
    corpus_name,
    read_columns,
    read_pairs,
)
from transduce.data.lines import read_lines
from transduce.data.sources import Sources, pair_sources
from transduce.errors import DataError, SettingsError


def in_columns(corpus: Corpus, n: int, src_lang: str = "en", tgt_lang: str = "de") -> Iterator[PairColumns]:
    if corpus.src and corpus.tgt:
        return read_columns(corpus.src, corpus.tgt, n)
    return columns_of(read_pairs(corpus, src_lang=src_lang, tgt_lang=tgt_lang), n)


def pairs_of(corpus: Corpus, src_lang: str = "en", tgt_lang: str = "de") -> list[Pair]:
    """The pairs, which are the same in columns, also in another process."""
    pairs = list(read_pairs(corpus, src_lang=src_lang, tgt_lang=tgt_lang))
    for n in (1, 2, 1000):
        columns = list(in_columns(corpus, n, src_lang, tgt_lang))
        assert [pair for some in columns for pair in some] == pairs
        assert [some.pair(i) for some in pickle.loads(pickle.dumps(columns)) for i in range(len(some))] == pairs
    return pairs


def texts(corpus: Corpus, src_lang: str = "en", tgt_lang: str = "de") -> list[tuple[str, str]]:
    return [(pair.src, pair.tgt) for pair in pairs_of(corpus, src_lang, tgt_lang)]


def file(folder: Path, name: str, content: str) -> Corpus:
    path = folder / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    return Corpus(path=path)


def two_files(folder: Path, src: str, tgt: str) -> Corpus:
    (folder / "a.en").write_bytes(src.encode())
    (folder / "a.de").write_bytes(tgt.encode())
    return Corpus(src=folder / "a.en", tgt=folder / "a.de")


def problem(corpus: Corpus) -> str:
    with pytest.raises(DataError) as caught:
        pairs_of(corpus)
    for n in (2, 1000):
        with pytest.raises(DataError) as again:
            deque(in_columns(corpus, n))
        assert str(again.value) == str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_two_text_files_line_for_line(tmp_path: Path) -> None:
    corpus = two_files(tmp_path, "one\n\nthree\u2028\x00\r\n", "eins\nzwei\n")
    (tmp_path / "a.de").write_text("eins\nzwei\ndrei")
    name = str(tmp_path / "a.en")
    assert pairs_of(corpus) == [
        Pair("one", "eins", name, 1),
        Pair("", "zwei", name, 2),
        Pair("three\u2028\x00", "drei", name, 3),
    ]
    assert corpus_files(corpus) == [tmp_path / "a.en", tmp_path / "a.de"]
    assert corpus_name(corpus) == "a.en + a.de"


@pytest.mark.parametrize(("n_src", "n_tgt"), [(5, 3), (3, 5), (1, 0), (0, 2), (3, 4)])
def test_files_of_different_length_are_refused_with_the_line(tmp_path: Path, n_src: int, n_tgt: int) -> None:
    corpus = two_files(tmp_path, "s\n" * n_src, "t\n" * n_tgt)
    (longer, most), (shorter, least) = sorted(
        ((corpus.src, n_src), (corpus.tgt, n_tgt)), key=lambda side: side[1], reverse=True
    )
    assert problem(corpus) == (f"{longer} has {most} lines, {shorter} has {least}: line {least + 1} has no counterpart")


def test_an_error_in_one_of_two_files_names_file_and_line(tmp_path: Path) -> None:
    corpus = two_files(tmp_path, "a\nb\n", "c\n")
    (tmp_path / "a.de").write_bytes(b"c\n\xfc\n")
    assert problem(corpus).startswith(f"{tmp_path / 'a.de'}, line 2: not valid UTF-8 (byte 0xfc at byte 1 of the line)")
    corpus = two_files(tmp_path, "a\nb\nc\n", "")
    (tmp_path / "a.en").write_bytes(b"a\nb\nc\n\xff")
    (tmp_path / "a.de").write_bytes(b"c\n\xfc\nd\n")
    assert problem(corpus).startswith(f"{tmp_path / 'a.de'}, line 2: not valid UTF-8")
    (tmp_path / "a.de").unlink()
    assert problem(corpus) == f"cannot read {tmp_path / 'a.de'}: No such file or directory"


def test_tsv(tmp_path: Path) -> None:
    corpus = file(tmp_path, "a.tsv", 'one "two\teins\tCC-BY\n\n\t"zwei\t\n')
    assert texts(corpus) == [('one "two', "eins"), ("", ""), ("", '"zwei')]
    assert [(pair.file, pair.line) for pair in pairs_of(corpus)] == [(str(corpus.path), n) for n in (1, 2, 3)]


def test_the_first_line_of_tsv_may_be_blank(tmp_path: Path) -> None:
    assert texts(file(tmp_path, "a.tsv", "\none\teins\n")) == [("", ""), ("one", "eins")]
    assert texts(file(tmp_path, "a.tsv", "\n \nde\ten\neins\tone\n")) == [("", ""), ("", ""), ("one", "eins")]


def test_a_tsv_header_names_the_columns(tmp_path: Path) -> None:
    corpus = file(tmp_path, "a.tsv.gz", "id\tDE\ten\n1\teins\tone\n")
    assert texts(corpus) == [("one", "eins")]
    assert texts(corpus, "de", "en") == [("eins", "one")]
    assert texts(corpus, "fr", "en") == [("id", "DE"), ("1", "eins")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("one eins\n", "line 1: no tab; expected source<TAB>target"),
        ("one\teins\ntwo\n", "line 2: line 1 has 2 columns, this line has 1"),
        ("one\teins\ntwo\tzwei\tdrei\n", "line 2: line 1 has 2 columns, this line has 3"),
        ("\none\teins\ntwo\n", "line 3: line 2 has 2 columns, this line has 1"),
    ],
)
def test_malformed_tsv(tmp_path: Path, content: str, message: str) -> None:
    corpus = file(tmp_path, "a.tsv", content)
    assert problem(corpus) == f"{corpus.path}, {message}"


def test_jsonl(tmp_path: Path) -> None:
    values = [
        {"src": "one", "tgt": "eins"},
        {"en": "two\u2028", "de": "zwei", "id": 2},
        {"translation": {"de": "drei", "en": "three\n  lines\r\nhere\n"}},
        {"src": "\U0001f600", "tgt": ""},
    ]
    lines = [json.dumps(value) for value in values]
    corpus = file(tmp_path, "a.jsonl", "\n".join([*lines[:2], "", *lines[2:]]) + "\n")
    assert texts(corpus) == [
        ("one", "eins"),
        ("two\u2028", "zwei"),
        ("", ""),
        ("three lines here", "drei"),
        ("\U0001f600", ""),
    ]
    assert pairs_of(corpus)[-1].where == f"{corpus.path}:5"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"src": "a"', "not valid JSON: Expecting ',' delimiter"),
        ("[" * 100_000, "not valid JSON: "),
        ('{"src": "a"}', 'expected {"src": "...", "tgt": "..."} or {"en": "...", "de": "..."}'),
        ('{"src": "a", "tgt": 5}', 'expected {"src": "...", "tgt": "..."} or'),
        ('["a", "b"]', 'expected {"src": "...", "tgt": "..."} or'),
        ('{"src": "a", "tgt": "\\ud83d"}', "half of a surrogate pair"),
    ],
)
def test_malformed_jsonl(tmp_path: Path, line: str, message: str) -> None:
    corpus = file(tmp_path, "a.jsonl", '{"src": "a", "tgt": "b"}\n' + line + "\n")
    assert problem(corpus).startswith(f"{corpus.path}, line 2: {message}")


def test_malformed_jsonl_without_languages_names_its_form_once(tmp_path: Path) -> None:
    corpus = file(tmp_path, "a.jsonl", "[]\n")
    with pytest.raises(DataError, match=r'expected \{"src": "...", "tgt": "..."\} \(.*found list$'):
        list(read_pairs(corpus, src_lang="src", tgt_lang="tgt"))


@pytest.mark.parametrize("name", ["a.csv", "a.txt.gz", "a"])
def test_an_unknown_format_lists_the_known_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_pairs(Corpus(path=tmp_path / name), src_lang="en", tgt_lang="de")  # at once, before any pair is drawn
    assert str(caught.value).startswith(
        f"{tmp_path / name}: unknown format; known: .tsv, .jsonl, .tmx, .parquet, .arrow (also .gz, .xz, .zst)"
    )


def test_a_new_format_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, its fingerprint and the doctor read a format that is only in `PAIR_FORMATS`."""

    def read(path: Path, src_lang: str, tgt_lang: str) -> Iterator[tuple[int, str, str]]:
        for line, text in enumerate(read_lines(path), 1):
            src, _, tgt = text.partition(" = ")
            yield line, src, tgt

    monkeypatch.setitem(PAIR_FORMATS, ".eq", read)
    (tmp_path / "a.eq.gz").write_bytes(gzip.compress(b"one = eins\ntwo = zwei\n"))
    (source,) = pair_sources(Settings.from_mapping({"data": {"train": [{"path": str(tmp_path / "a.eq.gz")}]}})).train
    (windows,) = take_sample(Sources((source,))).train
    assert windows.kept[0][1] == Pair("two", "zwei", str(tmp_path / "a.eq.gz"), 2)
    assert len(source.mark()) == 32
