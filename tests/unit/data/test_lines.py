"""Lines of files: where they end, what they may contain, and a one-line error for each problem."""

import gzip
import io
import lzma
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from transduce.data import lines
from transduce.data.lines import Unreadable, bare_suffix, decode_lines, read_lines, read_records, zstd
from transduce.errors import DataError

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstd.compress,
}
TEXT = "eins\nzwei\u2028drei\x0c\x85\r\n\nvier \x00 \r fünf\n猫\n"
WANTED = ["eins", "zwei\u2028drei\x0c\x85", "", "vier \x00 \r fünf", "猫"]

packed = pytest.mark.parametrize("suffix", list(PACKERS))


def write(folder: Path, suffix: str, content: bytes) -> Path:
    path = folder / f"text.en{suffix}"
    path.write_bytes(PACKERS[suffix](content))
    return path


def problem(path: Path | str) -> str:
    with pytest.raises(DataError) as caught:
        list(read_lines(path))
    if path != "-":
        try:
            faults = [line.kind for line in read_records(Path(path), 1 << 20) if isinstance(line, Unreadable)]
        except DataError as again:
            assert str(again) == str(caught.value)
        else:
            assert faults[0] in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@packed
def test_lines_end_at_newlines_only(tmp_path: Path, suffix: str) -> None:
    assert list(read_lines(write(tmp_path, suffix, TEXT.encode()))) == WANTED


@packed
def test_a_last_line_needs_no_end_and_a_byte_order_mark_is_dropped(tmp_path: Path, suffix: str) -> None:
    content = b"\xef\xbb\xbf" + "\ufeffa\n\ufeffb".encode()
    assert list(read_lines(write(tmp_path, suffix, content))) == ["\ufeffa", "\ufeffb"]
    assert list(read_lines(write(tmp_path, suffix, b""))) == []
    assert list(read_lines(write(tmp_path, suffix, b"\n"))) == [""]
    assert list(read_lines(write(tmp_path, suffix, b"a\r"))) == ["a\r"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text().filter(lambda s: "\n" not in s and not s.endswith("\r")), max_size=6))
def test_any_lines_are_read_as_written(wanted: list[str]) -> None:
    content = "".join(line + "\n" for line in wanted).encode()
    assume(len(content) < 6 or 4 * sum(byte < 9 for byte in content) < len(content))  # as UTF-16 has
    first = [line.removeprefix("\ufeff") if n == 0 else line for n, line in enumerate(wanted)]
    assert list(decode_lines(io.BytesIO(content), "text")) == first


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 16])
def test_lines_may_be_read_in_any_pieces(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_BLOCK", block)
    content = b"\xef\xbb\xbf" + "a\r\n\r\n\nsch\u00f6n \U0001f600\r\nb\r\rc\n\r\r\nlast\r".encode()
    wanted = ["a", "", "", "sch\u00f6n \U0001f600", "b\r\rc", "", "last\r"]
    assert list(decode_lines(io.BytesIO(content), "text")) == wanted
    assert list(read_records(write(tmp_path, "", content), 1 << 20)) == wanted
    read = decode_lines(io.BytesIO(b"a\nb\n\xff\nc\n"), "text")
    assert [next(read), next(read)] == ["a", "b"]
    with pytest.raises(DataError, match="text, line 3: not valid UTF-8"):
        next(read)


@packed
def test_concatenated_compressed_parts_are_read_in_order(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(PACKERS[suffix](b"a\nb") + PACKERS[suffix](b"c\nd\n"))
    assert list(read_lines(path)) == ["a", "bc", "d"]


@packed
def test_invalid_utf8_is_refused_with_line_and_byte(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, suffix, "gut\nschön ".encode() + b"\xe4h\nrest\n")
    assert problem(path) == f"{path}, line 2: not valid UTF-8 (byte 0xe4 at byte 8 of the line); convert it to UTF-8"


@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-16-LE", "UTF-16-BE", "UTF-32", "UTF-32-LE", "UTF-32-BE"])
def test_other_encodings_of_unicode_are_recognised(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(("\ufeff" * (len(encoding) > 6) + "Straße\n").encode(encoding))
    name = encoding[:6]
    assert problem(path) == (
        f"{path}, line 1: this is {name}, not UTF-8; convert it, for instance with iconv -f {name} -t UTF-8"
    )


@pytest.mark.parametrize(
    "text", ["The big dog sees.", "A\nB\nC", "Старый врач спит.\n" * 99, "Ծառը մեծ է։", "Στρ.\nα β"]
)
@pytest.mark.parametrize("encoding", ["UTF-16LE", "UTF-16BE"])
def test_utf_16_without_a_byte_order_mark_is_recognised(tmp_path: Path, text: str, encoding: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode(encoding))
    assert f"this is {encoding}, not UTF-8" in problem(path)


@pytest.mark.parametrize("text", ["\0", "a\0b\0", "The\0dog\0sees", "\x01a\x02b\x03c", "\0\0\0\0", "a\0\0b" * 99])
def test_text_with_control_characters_is_no_utf_16(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    assert list(read_lines(path)) == [text]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("keep", [-1, 0.5])
def test_a_truncated_compressed_file_is_an_error(tmp_path: Path, suffix: str, keep: float) -> None:
    path = write(tmp_path, suffix, b"".join(b"line %d\n" % n for n in range(50_000)))
    content = path.read_bytes()
    path.write_bytes(content[: keep if keep == -1 else int(len(content) * keep)])
    assert problem(path).startswith(f"{path}: damaged or truncated: ")


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_a_file_with_a_wrong_suffix_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(b"plain text, not compressed at all\n" * 10)
    assert problem(path).startswith(f"{path}: damaged or truncated: ")


@packed
def test_missing_files_and_folders(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"none{suffix}"
    assert problem(path) == f"cannot read {path}: No such file or directory"
    path.mkdir()
    assert problem(path) == f"{path} is a folder; name a text file"


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_a_line_without_end_is_refused_in_bounded_memory(tmp_path: Path, suffix: str) -> None:
    """A decompression bomb: 32 MiB of one letter from a few kilobytes. The lines around it can be read."""
    path = write(tmp_path, suffix, b"short\n" + b"x" * (32 << 20) + b"\nnext\n")
    tracemalloc.start()
    with pytest.raises(DataError, match=r"line 2: longer than data\.max_record = 1,048,576 bytes"):
        list(read_lines(path, 1 << 20))
    first, second, third = read_records(path, 1 << 20)
    assert (first, third) == ("short", "next")
    assert isinstance(second, Unreadable) and second.kind == "longer than data.max_record"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20


def test_the_longest_line_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(decode_lines(io.BytesIO(b"12345\nabcde\n123"), "text", 6)) == ["12345", "abcde", "123"]
    with pytest.raises(DataError, match=r"text, line 1: longer than data\.max_record = 6 bytes"):
        list(decode_lines(io.BytesIO(b"1234567\n"), "text", 6))
    monkeypatch.setattr(lines, "MAX_LINE", 1 << 20)  # of commands without settings
    with pytest.raises(DataError, match="text, line 1: longer than 1 MiB; is this a text file"):
        list(decode_lines(io.BytesIO(b"x" * (1 << 20)), "text"))


def test_the_time_to_read_line_ends_is_linear(tmp_path: Path) -> None:
    assert list(read_lines(write(tmp_path, "", b"\r" * 1_000_000 + b"x\r\r\n"))) == ["\r" * 1_000_000 + "x"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([b"a", b"\xc3\xa4 b", b"\xff", b"", b"x" * 40, b"y\r"]), max_size=30))
def test_unreadable_lines_are_records_too(tmp_path_factory: pytest.TempPathFactory, raw: list[bytes]) -> None:
    path = write(tmp_path_factory.mktemp("lines"), "", b"".join(line + b"\n" for line in raw))
    records = list(read_records(path, 40))
    kinds = {b"\xff": "not valid UTF-8", b"x" * 40: "longer than data.max_record"}
    assert [line.kind if isinstance(line, Unreadable) else "" for line in records] == [kinds.get(x, "") for x in raw]
    texts = [line for line in records if isinstance(line, str)]
    assert texts == [line.removesuffix(b"\r").decode() for line in raw if line not in kinds]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("ä\n\nb\xa0\r\n".encode()), encoding="ascii"))
    assert list(read_lines("-")) == ["ä", "", "b\xa0"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\n\xff\n")))
    assert problem("-").startswith("standard input, line 2: not valid UTF-8 (byte 0xff at byte 1 of the line)")


def test_lines_stream(tmp_path: Path) -> None:
    """The first line is returned before the rest is read, so the error in line 2 is not seen yet."""
    path = write(tmp_path, "", b"good\n\xff\n")
    assert next(iter(read_lines(path))) == "good"


@pytest.mark.parametrize(
    ("name", "suffix"),
    [("a.tsv", ".tsv"), ("a.TSV.gz", ".tsv"), ("a.b.jsonl.zst", ".jsonl"), ("a", ""), ("a.xz", ""), ("a.de", ".de")],
)
def test_the_suffix_without_compression(name: str, suffix: str) -> None:
    assert bare_suffix(Path("x.y") / name) == suffix
