"""Read text files line by line: plain, .gz, .xz or .zst; strict UTF-8; lines end at newlines only.

Memory is bounded whatever a text file contains. Errors name the file and, where possible, the line.
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
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from transduce.config.settings import is_remote
from transduce.errors import DataError, SettingsError, TransduceError, message_of
from transduce.text.special import Vocabulary
from transduce.text.vectors import is_vectors, open_vectors

if sys.version_info >= (3, 14):  # other modules import it from here
    from compression import zstd as zstd
else:
    from backports import zstd as zstd

T = TypeVar("T")
U = TypeVar("U")

MAX_LINE = 1 << 24
"""Bytes of the longest line that is accepted as text: 16 MiB."""
TOO_LONG = f"longer than {MAX_LINE >> 20} MiB; is this a text file?"

_SPACES = re.compile(r"\s+")
_BOM = b"\xef\xbb\xbf"
_NEWLINE = ord("\n")
_BLOCK = 1 << 16  # bytes read per call
_SECONDS = 60  # without an answer of a web server
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstd.ZstdError)

COMPRESSIONS: dict[str, Callable[[Any], io.BufferedIOBase]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".zst": zstd.open,
}


def _open_remote(url: str, *, in_order: bool) -> Any:
    """Open a file for reading with fsspec. Raises `SettingsError` without the libraries that its protocol needs.

    `in_order`: it is read once from the start to the end, which every web server allows. A server may take any time for
    a file, but not for the next bytes of it.
    """
    import fsspec  # PyTorch requires it

    options: dict[str, Any] = {}
    try:
        if url.startswith("http"):
            from aiohttp import ClientTimeout

            timeout = ClientTimeout(total=None, sock_connect=_SECONDS, sock_read=_SECONDS)
            options = {"client_kwargs": {"timeout": timeout}, "block_size": 0 if in_order else None}
        return fsspec.open(url, "rb", **options).open()
    except (ImportError, ValueError) as error:  # no library for the protocol, or no such protocol
        raise SettingsError(f"{url}: {error}; pip install 'transduce[remote]' for https, s3 and hf") from error


def _reason(error: Exception) -> str:
    """The reason that a file cannot be read. fsspec raises FileNotFoundError(url) from most errors of a server."""
    cause: Any = error.__cause__ or error
    if isinstance(cause, TimeoutError):
        return message_of(cause) or "no answer in time"
    if status := getattr(cause, "status", 0):  # of HTTP, in errors of aiohttp
        return f"{status} {getattr(cause, 'message', '')}"
    if isinstance(cause, FileNotFoundError):
        return cause.strerror or "not found"
    return message_of(cause) or type(cause).__name__


def format_path(path: Path) -> str:
    """A path for people: of a remote file its address, `https://host/a.tsv`."""
    return path.as_posix().replace(":/", "://", 1) if is_remote(path) else str(path)


def bare_suffix(path: Path) -> str:
    """The suffix that determines the format, in lower case, without that of a compression: `.tsv` of `a.TSV.gz`."""
    return Path(path.stem if path.suffix.lower() in COMPRESSIONS else path.name).suffix.lower()


def is_missing(path: Path) -> bool:
    """Whether a local file does not exist. Nothing is asked of a server."""
    return not is_remote(path) and not path.exists()


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        sets = sorted(format_path(one.parent) for one in path.glob("*/state.json"))  # of a saved DatasetDict
        raise DataError(f"{path} is a folder; name {'one of ' + ', '.join(sets) if sets else 'a text file'}")


def check_is_text(path: Path) -> None:
    """Refuse what is not a regular file: a folder, a pipe, a device."""
    _refuse_folder(path)
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is a pipe or a device; write the text to a file first")


@contextlib.contextmanager
def _open_stored(path: Path, *, in_order: bool) -> Iterator[io.BufferedReader]:
    """Open a local or remote file as it is stored. Missing and damaged files are a `DataError`."""
    _refuse_folder(path)
    name = format_path(path)
    try:
        with _open_remote(name, in_order=in_order) if is_remote(path) else path.open("rb", buffering=0) as file:
            yield io.BufferedReader(file, 1 << 16)
    except _DAMAGE as error:
        raise DataError(f"{name}: damaged or truncated: {error}") from None
    except OSError as error:
        reason = _reason(error) if is_remote(path) else error.strerror or error
        raise DataError(f"cannot read {name}: {reason}") from None
    except Exception as error:  # each of the libraries for remote files has its own
        if not is_remote(path) or isinstance(error, TransduceError):
            raise
        raise DataError(f"cannot read {name}: {_reason(error)}") from error


@contextlib.contextmanager
def open_bytes(path: Path, *, in_order: bool = True) -> Iterator[tuple[io.BufferedIOBase, Callable[[], int]]]:
    """Open a file for reading, decompressed according to its suffix, and a function for the bytes of it that were read.

    `in_order` false: it is not read from the start to the end, which not every web server allows. Missing and damaged
    files are a `DataError`.
    """
    with _open_stored(path, in_order=in_order) as stored:
        unpack = COMPRESSIONS.get(path.suffix.lower())
        if unpack is None:
            yield stored, stored.tell
        else:
            with unpack(stored) as unpacked:
                yield io.BufferedReader(cast(io.RawIOBase, unpacked), 1 << 16), stored.tell


def content_mark(path: Path) -> bytes:
    """The sha256 of a file; of a remote one that of its size and its first MiB, so that it is not loaded twice."""
    check_is_text(path)
    with _open_stored(path, in_order=False) as file:
        if not is_remote(path):
            return hashlib.file_digest(file, "sha256").digest()
        raw: Any = file.raw
        return hashlib.sha256(f"{raw.size}\n".encode() + file.read(1 << 20)).digest()


def read_lines(path: Path | str) -> Iterator[str]:
    r"""Yield the lines of a UTF-8 text file, or of standard input for `-`.

    Lines end at `\n` only, so other separators (U+2028, form feed) stay inside their line. A `\r` before the `\n` and
    a byte order mark at the start are removed. The last line need not end in `\n`. A file of vectors is a `DataError`.
    """
    if str(path) == "-":
        yield from decode_lines(cast(io.BufferedIOBase, sys.stdin.buffer), "standard input")
        return
    with _open_text(Path(path)) as file:
        yield from decode_lines(file, format_path(Path(path)))


@contextlib.contextmanager
def _open_text(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open a file for reading, decompressed. A file of vectors is a `DataError`."""
    if is_vectors(path):
        raise DataError(f"{format_path(path)} is a file of vectors; a text file belongs here")
    with open_bytes(path) as (file, _):
        yield file


def read_inputs(path: Path | str, vocabulary: Vocabulary | None = None) -> Iterator[str]:
    """The inputs of a model in a file: the lines of a text file, or the names of the sequences in a file of vectors.

    `vocabulary`: the model's. It raises `DataError` for a file of vectors if it encodes text.
    """
    vectors = open_vectors(path, vocabulary)
    return read_lines(path) if vectors is None else vectors.names


def aligned(first: Iterable[T], second: Iterable[U], names: tuple[object, object]) -> Iterator[tuple[int, T, U]]:
    """Number the lines of two texts, which must have as many. A `DataError` gives both numbers."""
    sides = iter(first), iter(second)
    for number, (one, other) in enumerate(itertools.zip_longest(*sides), 1):
        if one is None or other is None:
            longer, shorter, rest = (*names, sides[0]) if other is None else (*names[::-1], sides[1])
            n = number + sum(1 for _ in rest)
            raise DataError(f"{longer} has {n} lines, {shorter} has {number - 1}: line {number} has no counterpart")
        yield number, one, other


def read_parallel(src: Path, tgt: Path, vocabulary: Vocabulary) -> tuple[list[str], list[str]]:
    """Read the inputs of a model and the lines of a text file, which must be `aligned`.

    `vocabulary`: the model's. Raises `DataError` if the files are empty.
    """
    pairs = list(aligned(read_inputs(src, vocabulary), read_lines(tgt), (format_path(src), format_path(tgt))))
    if not pairs:
        raise DataError(f"{format_path(src)} is empty")
    return [source for _, source, _ in pairs], [target for _, _, target in pairs]


def one_line(text: str) -> str:
    """Replace line breaks inside a sentence, which JSON and XML allow, and the white space around them by a space."""
    if "\n" not in text and "\r" not in text:
        return text
    return _SPACES.sub(lambda found: " " if {"\n", "\r"} & {*found[0]} else found[0], text.strip("\r\n"))


def decode_lines(file: io.BufferedIOBase, name: str) -> Iterator[str]:
    """Decode the lines of an open file; a `DataError` names a line that is not UTF-8 or is too long."""
    for lines, first, _ in _blocks(file, name):
        yield from _decode(lines, first, name)


class EncodedLines:
    """Consecutive lines of a text file, as bytes until they are used."""

    def __init__(self, data: bytes, n: int) -> None:
        """`data`: `n` lines in UTF-8, with newlines between them."""
        self._data, self._n = data, n

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[str]:
        return iter(self._data.decode("utf-8").split("\n"))

    def __getitem__(self, i: int) -> str:
        """Line `i`, from 0."""
        return self._data[self._starts[i] : self._starts[i + 1] - 1].decode("utf-8")

    def __reduce__(self) -> tuple[Any, ...]:
        return EncodedLines, (self._data, self._n)

    @cached_property
    def _starts(self) -> list[int]:
        """The byte at which each line starts, and at which one after the last would."""
        return [0, *(np.flatnonzero(_newlines(self._data)) + 1).tolist(), len(self._data) + 1]


def read_encoded(path: Path, n: int) -> Iterator[EncodedLines]:
    """The lines of a text file, `n` at a time. Raises the errors that `read_lines` raises."""
    pending, n_pending = list[bytes](), 0
    with _open_text(path) as file:
        for block, first, n_lines in _blocks(file, format_path(path)):
            if _decoded(block) is None:
                for _ in _decode(block, first, format_path(path)):
                    pass  # until the error, if there is one
            while n_pending + n_lines >= n:
                missing = n - n_pending
                lines = block.split(b"\n", missing)
                yield EncodedLines(b"\n".join([*pending, *lines[:missing]]), n)
                pending, n_pending = [], 0
                block, n_lines = b"".join(lines[missing:]), n_lines - missing
            if n_lines:
                pending.append(block)
                n_pending += n_lines
    if pending:
        yield EncodedLines(b"\n".join(pending), n_pending)


def _newlines(data: bytes) -> np.ndarray:
    """bool [N]: which bytes are newlines. Several times as fast as methods of `bytes`."""
    return np.frombuffer(data, np.uint8) == _NEWLINE


def _blocks(file: io.BufferedIOBase, name: str) -> Iterator[tuple[bytes, int, int]]:
    """Yield blocks of whole lines, with newlines between them; the number of the first line; the number of lines."""
    number, rest, bom = 1, b"", _BOM
    while block := file.read1(_BLOCK):
        whole, newline, rest = (rest + block).rpartition(b"\n")
        if newline:
            n = int(np.count_nonzero(_newlines(whole))) + 1
            yield whole.removeprefix(bom).replace(b"\r\n", b"\n").removesuffix(b"\r"), number, n
            number, bom = number + n, b""
        elif len(rest) >= MAX_LINE:
            raise DataError(f"{name}, line {number}: {TOO_LONG}")
    if rest:
        yield rest.removeprefix(bom), number, 1


def _decoded(lines: bytes) -> str | None:
    """The text, or None if a line may be faulty."""
    with contextlib.suppress(UnicodeDecodeError):
        return lines.decode("utf-8") if len(lines) < MAX_LINE else None
    return None


def _decode(lines: bytes, first: int, name: str) -> Iterator[str]:
    """Decode lines; `first`: the number of the first one. Those before a faulty one are yielded."""
    if (text := _decoded(lines)) is not None:
        yield from text.split("\n")
        return
    for number, raw in enumerate(lines.split(b"\n"), first):
        if len(raw) >= MAX_LINE:
            raise DataError(f"{name}, line {number}: {TOO_LONG}")
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{name}, line {number}: {_explain(raw, error, first=number == 1)}") from None


def _explain(raw: bytes, error: UnicodeDecodeError, *, first: bool) -> str:
    """The error in the bytes of a line. UTF-16 files begin with a byte order mark."""
    if first and raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "this is UTF-16, not UTF-8; convert it, for instance with iconv -f UTF-16 -t UTF-8"
    return f"not valid UTF-8 (byte 0x{raw[error.start]:02x} at byte {error.start + 1} of the line); convert it to UTF-8"
