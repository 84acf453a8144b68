"""Pairs from every format, with file and line; malformed files are refused with file and line."""

import gzip
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from transduce.config.settings import Corpus, DataSettings, Settings
from transduce.data.lines import read_lines
from transduce.data.pairs import PAIR_FORMATS, Pair, corpus_files, read_pairs
from transduce.data.reading import Sources, pair_sources, take_sample
from transduce.errors import DataError, SettingsError

ADVICE = "; data.on_error = 'skip' leaves out records that cannot be read"


def pairs_of(corpus: Corpus, src_lang: str = "en", tgt_lang: str = "de") -> list[Pair]:
    return list(read_pairs(corpus, DataSettings(src_lang=src_lang, tgt_lang=tgt_lang)))


def kind_of(pair: Pair) -> str:
    return pair.fault.kind if pair.fault else ""


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
    variants = file(tmp_path, "b.tsv", "de-DE\ten_US\neins\tone\n")
    assert texts(variants) == texts(variants, "en-GB", "de") == [("one", "eins")]
    text = file(tmp_path, "c.tsv", "en masse\tde la\none\teins\n")
    assert texts(text) == [("en masse", "de la"), ("one", "eins")]


@pytest.mark.parametrize("header", ["de\ten", "id\tDE-de\ten_US"])
@pytest.mark.parametrize("unset", [{}, {"src_lang": "fr"}, {"on_error": "skip"}])
def test_a_tsv_header_without_chosen_languages_is_refused(tmp_path: Path, header: str, unset: dict[str, str]) -> None:
    corpus = file(tmp_path, "a.tsv", f"\n{header}\n" + "\t".join("eins" for _ in header.split("\t")))
    with pytest.raises(DataError, match=r"line 2: columns .*de.*, en.*; choose with data.src_lang and data.tgt_lang"):
        list(read_pairs(corpus, DataSettings(**unset)))  # type: ignore[arg-type]


@pytest.mark.parametrize("line", ["he\the", "so what\tna und", "src\tde"])
def test_a_first_line_of_tsv_that_is_no_header(tmp_path: Path, line: str) -> None:
    pairs = list(read_pairs(file(tmp_path, "a.tsv", f"{line}\none\teins\n"), DataSettings()))
    assert [pair[:2] for pair in pairs] == [tuple(line.split("\t")), ("one", "eins")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("one eins\n", "line 1: no tab; expected source<TAB>target"),
        ("one\teins\ntwo\n", "line 2: no tab; expected source<TAB>target"),
        ("one\teins\rtwo\tzwei\r", "line 1: lines end in \\r; convert their ends to \\n"),
        ("\none\teins\ntwo\tzwei\tdrei\n", "line 3: another number of columns: line 2 has 2 columns, this line has 3"),
    ],
)
def test_malformed_tsv(tmp_path: Path, content: str, message: str) -> None:
    corpus = file(tmp_path, "a.tsv", content)
    assert problem(corpus) == f"{corpus.path}, {message}{ADVICE}"


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
        ('{"src": "a"}', 'no source and target: expected {"src": "...", "tgt": "..."} or {"en": "...", "de": "..."}'),
        ('{"src": "a", "tgt": 5}', 'no source and target: expected {"src": "...", "tgt": "..."} or'),
        ('["a", "b"]', 'no source and target: expected {"src": "...", "tgt": "..."} or'),
        ('{"src": "a", "tgt": "\\ud83d"}', "half of a surrogate pair"),
    ],
)
def test_malformed_jsonl(tmp_path: Path, line: str, message: str) -> None:
    corpus = file(tmp_path, "a.jsonl", '{"src": "a", "tgt": "b"}\n' + line + "\n")
    assert problem(corpus).startswith(f"{corpus.path}, line 2: {message}")


def test_malformed_jsonl_without_languages_names_its_form_once(tmp_path: Path) -> None:
    corpus = file(tmp_path, "a.jsonl", "[]\n")
    with pytest.raises(DataError, match=r'expected \{"src": "...", "tgt": "..."\} \(.*found list; '):
        list(read_pairs(corpus, DataSettings()))


@pytest.mark.parametrize("name", ["a.csv", "a.txt.gz", "a"])
def test_an_unknown_format_lists_the_known_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_pairs(Corpus(path=tmp_path / name), DataSettings())  # at once, before any pair is drawn
    assert str(caught.value).startswith(
        f"{tmp_path / name}: unknown format; known: .tsv, .jsonl, .tmx, .parquet (also .gz, .xz, .zst)"
    )


def test_a_new_format_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, its fingerprint and the doctor read a format that is only in `PAIR_FORMATS`."""

    def read(path: Path, settings: DataSettings) -> Iterator[Pair]:
        for line, text in enumerate(read_lines(path), 1):
            src, _, tgt = text.partition(" = ")
            yield Pair(src, tgt, str(path), line)

    monkeypatch.setitem(PAIR_FORMATS, ".eq", read)
    (tmp_path / "a.eq.gz").write_bytes(gzip.compress(b"one = eins\ntwo = zwei\n"))
    (source,) = pair_sources(Settings.from_mapping({"data": {"train": [{"path": str(tmp_path / "a.eq.gz")}]}})).train
    (windows,) = take_sample(Sources((source,))).train
    assert windows.kept[0][1] == Pair("two", "zwei", str(tmp_path / "a.eq.gz"), 2)
    assert len(source.mark()) == 32


SKIP = DataSettings(on_error="skip", max_record=60)


@pytest.mark.parametrize(
    ("name", "good", "bad", "reason"),
    [
        ("a.tsv", "one\teins", b"\xff\tzwei", "not valid UTF-8"),
        ("a.tsv", "one\teins", b"two\tzwei\tdrei", "another number of columns"),
        ("a.tsv", "one\teins", b"two", "no tab"),
        ("a.jsonl", '{"src": "one", "tgt": "eins"}', b'{"src": "two", "tgt": "\xff"}', "not valid UTF-8"),
        ("a.jsonl", '{"src": "one", "tgt": "eins"}', b'{"src": "two"', "not valid JSON"),
        ("a.jsonl", '{"src": "one", "tgt": "eins"}', b'{"src": "two"}', "no source and target"),
        ("a.jsonl", '{"src": "one", "tgt": "eins"}', b'{"src": "a", "tgt": "\\ud83d"}', "half of a surrogate pair"),
    ],
)
def test_records_that_cannot_be_read_are_skipped_and_named(
    tmp_path: Path, name: str, good: str, bad: bytes, reason: str
) -> None:
    """Of training text; a validation or test set is always read whole."""
    corpus = Corpus(path=tmp_path / name)
    (tmp_path / name).write_bytes(b"\n".join([good.encode()] * 3 + [bad] + [good.encode()] * 2 + [bad]))
    pairs = list(read_pairs(corpus, SKIP))
    assert [pair[:2] for pair in pairs if not pair.fault] == [("one", "eins")] * 5
    assert [pair.line for pair in pairs if kind_of(pair).startswith(reason)] == [4, 7]
    for settings, advice in ((SKIP, ""), (SKIP.model_copy(update={"on_error": "stop"}), ADVICE)):
        with pytest.raises(DataError, match=f"{name}, line 4: {reason}") as caught:
            deque(read_pairs(corpus, settings, held_out=settings is SKIP))
        assert str(caught.value).endswith(ADVICE) == bool(advice)


def test_lines_of_two_files_that_cannot_be_read_take_their_pair_with_them(tmp_path: Path) -> None:
    corpus = two_files(tmp_path, "one\ntwo\nthree\nfour\n", "")
    (tmp_path / "a.de").write_bytes(b"eins\n\xff\ndrei\n" + b"x" * 60)
    pairs = list(read_pairs(corpus, SKIP))
    assert [pair[:2] for pair in pairs] == [("one", "eins"), ("", ""), ("three", "drei"), ("", "")]
    assert [kind_of(pair) for pair in pairs] == ["", "not valid UTF-8", "", "longer than data.max_record"]
    (tmp_path / "a.de").write_bytes(b"eins\n\xff\ndrei\n")
    with pytest.raises(DataError, match="line 4 has no counterpart"):
        deque(read_pairs(corpus, SKIP))


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_records_that_are_too_large_are_dropped_like_long_pairs(tmp_path: Path, on_error: str) -> None:
    content = "one\teins\n" + "x" * 60 + "\tzwei\nthree\tdrei\n"
    settings = DataSettings(on_error=on_error, max_record=60)
    corpora = [file(tmp_path, "a.tsv", content), two_files(tmp_path, content, "eins\nzwei\ndrei\n")]
    for corpus in corpora:
        pairs = list(read_pairs(corpus, settings))
        assert [kind_of(pair) for pair in pairs] == ["", "longer than data.max_record", ""]
        with pytest.raises(DataError, match=r"line 2: longer than data.max_record = 60 bytes$"):
            deque(read_pairs(corpus, settings, held_out=True))
