"""Read text files line by line. Files are UTF-8, plain or compressed (.gz, .xz, .zst). Lines end at newlines only.

Memory is bounded for any content. Errors name the file and, if possible, the line.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import itertools
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from transduce.config.settings import is_remote
from transduce.errors import DataError, SettingsError, TransduceError, message_of
from transduce.text.special import Vocabulary
from transduce.text.vectors import VectorFile, is_vectors

if sys.version_info >= (3, 14):  # re-exported for other modules
    from compression import zstd as zstd
else:
    from backports import zstd as zstd


_SECONDS = 60  # longest wait for the next bytes from a web server


def open_remote(url: str, *, in_order: bool) -> Any:
    """Open a remote file for reading with fsspec. Raises `SettingsError` if a library for its protocol is missing.

    `in_order`: the file is read once from start to end, which every web server allows. The time for the whole file is
    not limited, but the time until the server sends the next bytes is.
    """
    options: dict[str, Any] = {}
    try:
        import fsspec

        if url.startswith("http"):
            from aiohttp import ClientTimeout

            timeout = ClientTimeout(total=None, sock_connect=_SECONDS, sock_read=_SECONDS)
            options = {"client_kwargs": {"timeout": timeout}, "block_size": 0 if in_order else None}
        return fsspec.open(url, "rb", **options).open()
    except (ImportError, ValueError) as error:  # unknown protocol, or its library is missing
        raise SettingsError(f"{url}: {error}; pip install 'transduce[remote]' for https, s3 and hf") from error


def reason_of(error: Exception) -> str:
    """The reason why a file cannot be read. fsspec turns most errors of a server into FileNotFoundError(url)."""
    cause: Any = error.__cause__ or error
    if isinstance(cause, TimeoutError):
        return message_of(cause) or "no answer in time"
    if status := getattr(cause, "status", 0):  # the HTTP status, in errors of aiohttp
        return f"{status} {getattr(cause, 'message', '')}"
    if isinstance(cause, FileNotFoundError):
        return cause.strerror or "not found"
    return message_of(cause) or type(cause).__name__


T = TypeVar("T")
U = TypeVar("U")

MAX_LINE = 1 << 24
"""Limit for the bytes of a line if no `data.max_record` applies: 16 MiB."""

TOO_LARGE = "longer than data.max_record"

_SPACES = re.compile(r"[ \t\r\n]+")
_LINE_ENDS = re.compile(rb"(?<!\r)\r+\n")
_BOM = b"\xef\xbb\xbf"
_OTHER_MARKS = {"UTF-32": (b"\xff\xfe\0\0", b"\0\0\xfe\xff"), "UTF-16": (b"\xff\xfe", b"\xfe\xff")}
"""Byte order marks of other encodings; the mark of UTF-32 begins with the mark of UTF-16."""
_BLOCK = 1 << 16  # bytes read per call
_FEWEST, _SAMPLE = 6, 1024  # minimum and maximum number of bytes used to detect UTF-16
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstd.ZstdError)

COMPRESSIONS: dict[str, Callable[[Any], io.BufferedIOBase]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".zst": zstd.open,
}


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The reason why a record cannot be read. `kind`: the problem without details, by which reports count records.

    has_text: False if the record never contained a pair of texts. names: The settings involved; see `UserError`.
    """

    kind: str
    details: str = ""
    has_text: bool = True
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.kind + self.details

    @property
    def stops(self) -> bool:
        """Whether `data.on_error` decides about the record. If not, cleaning drops it, like empty and long pairs."""
        return self.has_text and self.kind != TOO_LARGE


def too_long(max_record: int | None) -> Unreadable:
    """Describe a record that is too long. `max_record`: the value of `data.max_record`, or None if it is not used."""
    if max_record is None:
        return Unreadable(f"longer than {MAX_LINE >> 20} MiB", "; is this a text file?")
    return Unreadable(TOO_LARGE, f" = {max_record:,} bytes")


def format_path(path: Path) -> str:
    """Format a path for messages: a remote file as its URL, `https://host/a.tsv`."""
    return path.as_posix().replace(":/", "://", 1) if is_remote(path) else str(path)


def bare_suffix(path: Path) -> str:
    """The suffix that determines the format, in lower case, without a compression suffix: `.tsv` for `a.TSV.gz`."""
    return Path(path.stem if path.suffix.lower() in COMPRESSIONS else path.name).suffix.lower()


def is_missing(path: Path) -> bool:
    return not is_remote(path) and not path.exists()


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a text file")


def check_is_file(path: Path) -> None:
    """Raise `DataError` for a folder, a pipe or a device."""
    _refuse_folder(path)
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is a pipe or a device; write the text to a file first")


def check_is_text(path: Path) -> None:
    """Raise `DataError` for a file of vectors."""
    if is_vectors(path):
        raise DataError(f"{format_path(path)} is a file of vectors; a text file belongs here")


@contextlib.contextmanager
def _open_stored(path: Path, *, in_order: bool) -> Iterator[io.BufferedReader]:
    """Open a local or remote file without decompression. Raises `DataError` for missing and damaged files."""
    _refuse_folder(path)
    name = format_path(path)
    try:
        with open_remote(name, in_order=in_order) if is_remote(path) else path.open("rb", buffering=0) as file:
            yield io.BufferedReader(file, 1 << 16)
    except _DAMAGE as error:
        raise DataError(f"{name}: damaged or truncated: {error}") from None
    except OSError as error:
        reason = reason_of(error) if is_remote(path) else error.strerror or error
        raise DataError(f"cannot read {name}: {reason}") from None
    except Exception as error:  # each library for remote files has its own exceptions
        if not is_remote(path) or isinstance(error, TransduceError):
            raise
        raise DataError(f"cannot read {name}: {reason_of(error)}") from error


@contextlib.contextmanager
def open_bytes(path: Path, *, in_order: bool = True) -> Iterator[tuple[io.BufferedIOBase, Callable[[], int]]]:
    """Open a file, decompressed by its suffix. Also yields a function that counts the stored bytes read so far.

    `in_order`: False for random access, which not every web server allows. Raises `DataError` if missing or damaged.
    """
    with _open_stored(path, in_order=in_order) as stored:
        unpack = COMPRESSIONS.get(path.suffix.lower())
        if unpack is None:
            yield stored, stored.tell
        else:
            with unpack(stored) as unpacked:
                yield io.BufferedReader(cast(io.RawIOBase, unpacked), 1 << 16), stored.tell


def content_mark(path: Path) -> bytes:
    """Return the SHA-256 of a file, to detect changes.

    For a remote file, hash only its size and first MiB, so that it is not downloaded twice.
    """
    check_is_file(path)
    with _open_stored(path, in_order=False) as file:
        if not is_remote(path):
            return hashlib.file_digest(file, "sha256").digest()
        raw: Any = file.raw
        return hashlib.sha256(f"{raw.size}\n".encode() + file.read(1 << 20)).digest()


def read_lines(path: Path | str, max_record: int | None = None) -> Iterator[str]:
    r"""Yield the lines of a UTF-8 text file, or of standard input for `-`.

    Lines end at `\n` only, so other separators (U+2028, form feed) stay inside their line. Any `\r` before the `\n` and
    a byte order mark at the start are removed. The last line need not end in `\n`. `max_record`: limit for the bytes of
    a line (default: `MAX_LINE`). Raises `DataError` for a file of vectors.
    """
    if str(path) == "-":
        yield from decode_lines(cast(io.BufferedIOBase, sys.stdin.buffer), "standard input")
        return
    check_is_text(Path(path))
    with open_bytes(Path(path)) as (file, _):
        yield from decode_lines(file, format_path(Path(path)), max_record)


def read_records(path: Path, max_record: int) -> Iterator[str | Unreadable]:
    """Yield the lines of a text file like `read_lines`, but an `Unreadable` for a line that cannot be read.

    For a file of vectors, yield the names of its sequences.
    """
    if is_vectors(path):
        yield from VectorFile(path).names
        return
    with open_bytes(path) as (file, _):
        yield from _decode(file, format_path(path), max_record)


def read_inputs(
    path: Path | str,
    vocabulary: Vocabulary | None = None,
    *,
    labelled: bool = False,
    max_record: int | None = None,
) -> Iterator[str]:
    """Yield a model's inputs from a file: the lines of text, or the names of the sequences in a file of vectors.

    Args:
        path: The file; `-` is standard input.
        vocabulary: The model's vocabulary. If it reads text, a file of vectors raises `DataError`.
        labelled: Put the label of each sequence, and a tab, before its name.
        max_record: See `read_lines`.
    """
    if vocabulary is not None and vocabulary.reads_text:
        check_is_text(Path(path))
    if not is_vectors(path):
        return read_lines(path, max_record)
    file = VectorFile(Path(path))
    return map("\t".join, zip(file.labels, file.names, strict=True)) if labelled else file.names


def aligned(first: Iterable[T], second: Iterable[U], names: tuple[object, object]) -> Iterator[tuple[int, T, U]]:
    """Yield (line number, first line, second line) of two texts. Raises `DataError` if they differ in length."""
    sides = iter(first), iter(second)
    for number, (line, other) in enumerate(itertools.zip_longest(*sides), 1):
        if line is None or other is None:
            longer, shorter, rest = (*names, sides[0]) if other is None else (*names[::-1], sides[1])
            n = number + sum(1 for _ in rest)
            raise DataError(f"{longer} has {n} lines, {shorter} has {number - 1}: line {number} has no counterpart")
        yield number, line, other


def read_parallel(src: Path, tgt: Path, vocabulary: Vocabulary) -> tuple[list[str], list[str]]:
    """Read a model's inputs (see `read_inputs`) and the lines of a text file with equally many lines.

    `vocabulary`: the model's. Raises `DataError` if the files are empty.
    """
    pairs = list(aligned(read_inputs(src, vocabulary), read_lines(tgt), (format_path(src), format_path(tgt))))
    if not pairs:
        raise DataError(f"{format_path(src)} is empty")
    return [source for _, source, _ in pairs], [target for _, _, target in pairs]


def n_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def one_line(text: str) -> str:
    """Replace line breaks inside a sentence, which JSON and XML allow, and the spaces around them, by one space.

    Line breaks at the start and at the end are removed. Other white space, such as U+00A0 and U+2028, stays.
    """
    if "\n" not in text and "\r" not in text:
        return text

    def joined(spaces: re.Match[str]) -> str:
        if not {"\n", "\r"} & {*spaces[0]}:
            return spaces[0]
        return " " if spaces.start() > 0 and spaces.end() < len(text) else ""

    return _SPACES.sub(joined, text)


def decode_lines(file: io.BufferedIOBase, name: str, max_record: int | None = None) -> Iterator[str]:
    """Decode the lines of an open file. Raises `DataError`, which names the line, if one is not UTF-8 or too long."""
    for number, line in enumerate(_decode(file, name, max_record), 1):
        if isinstance(line, Unreadable):
            raise DataError(f"{name}, line {number}: {line}")
        yield line


def _decode(file: io.BufferedIOBase, name: str, max_record: int | None) -> Iterator[str | Unreadable]:
    """Decode the lines of an open file, `Unreadable` if faulty. Raises `DataError` if it is UTF-16 or UTF-32."""
    is_start, longest = True, max_record or MAX_LINE
    for lines in _blocks(file, longest):
        if is_start and (encoding := _other_encoding(lines)):
            fix = f"convert it, for instance with iconv -f {encoding} -t UTF-8"
            raise DataError(f"{name}, line 1: this is {encoding}, not UTF-8; {fix}")
        is_start, text = False, None
        if len(lines) < longest:
            with contextlib.suppress(UnicodeDecodeError):
                text = lines.decode("utf-8")
        if text is not None:
            yield from text.split("\n")
        else:
            yield from (_decode_line(line, max_record) for line in lines.split(b"\n"))


def _other_encoding(start: bytes) -> str | None:
    """Detect UTF-16 and UTF-32 by the byte order mark, and UTF-16 also by control bytes at every other offset.

    A few control characters in a short text do not count.
    """
    marked = (encoding for encoding, marks in _OTHER_MARKS.items() if start.startswith(marks))
    if (encoding := next(marked, None)) or b"\0" not in start[:_SAMPLE] or len(start) < _FEWEST:
        return encoding
    even, odd = (start[first:_SAMPLE:2] for first in (0, 1))
    is_high, is_low = (2 * sum(byte < 9 for byte in half) > len(half) for half in (even, odd))
    return None if is_high == is_low else "UTF-16BE" if is_high else "UTF-16LE"


def _decode_line(line: bytes, max_record: int | None) -> str | Unreadable:
    if len(line) >= (max_record or MAX_LINE):
        return too_long(max_record)
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line"
        return Unreadable("not valid UTF-8", f" ({where}); convert it to UTF-8")


def _blocks(file: io.BufferedIOBase, longest: int) -> Iterator[bytes]:
    """Yield blocks of whole lines, with newlines between them.

    If a line is too long, only its beginning is yielded, which still exceeds the limit.
    """
    bom, pending, size = _BOM, list[bytes](), 0  # pending: the beginning of a line
    is_cut = False  # whether to skip the rest of a line that is too long
    while block := file.read1(_BLOCK):
        if is_cut:
            _, newline, block = block.partition(b"\n")
            if not newline:
                continue
            is_cut = False
        whole, newline, rest = block.rpartition(b"\n")
        if newline:
            whole, pending, size = b"".join([*pending, whole]), [], 0
            whole = whole.removeprefix(bom).rstrip(b"\r")
            yield _LINE_ENDS.sub(b"\n", whole) if b"\r\r" in whole else whole.replace(b"\r\n", b"\n")
            bom = b""
        pending.append(rest)
        size += len(rest)
        if size >= longest:
            yield b"".join(pending).removeprefix(bom)
            bom, pending, size, is_cut = b"", [], 0, True
    if size:
        yield b"".join(pending).removeprefix(bom)
