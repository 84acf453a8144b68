"""Read text files line by line: plain, .gz, .xz or .zst; strict UTF-8; lines end at newlines only.

Memory is bounded whatever the file contains. Errors name the file and, where possible, the line.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from transduce.config.settings import is_remote
from transduce.errors import DataError, SettingsError, message_of
from transduce.text.special import Vocabulary
from transduce.text.vectors import is_vectors, open_vectors

MAX_LINE = 1 << 24
"""Bytes of the longest line that is accepted as text: 16 MiB."""
TOO_LONG = f"longer than {MAX_LINE >> 20} MiB; is this a text file?"

MAX_RATIO, UNCHECKED_BYTES = 100, 1 << 26
"""Beyond 64 MiB, a compressed file may expand at most so many times. Text expands 3 to 30 times."""

_SPACES = re.compile(r"\s+")
_BOM = b"\xef\xbb\xbf"
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstandard.ZstdError)


class _ZstdFile(io.RawIOBase):
    """Reads .zst frames one after another. Unlike zstandard's own reader, it reports a truncated file."""

    _CHUNK = 512  # bytes read at once: even of a decompression bomb they become at most 16 MiB

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file = file
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._rest = b""  # compressed bytes beyond the end of a frame
        self._ready = memoryview(b"")  # decompressed bytes not yet handed out

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            chunk = self._rest or self._file.read(self._CHUNK)
            if not chunk:
                if self._frame is not None:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._ready = memoryview(self._frame.decompress(chunk))
            self._rest = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        n = min(len(buffer), len(self._ready))
        buffer[:n], self._ready = self._ready[:n], self._ready[n:]
        return n


class _Watched(io.RawIOBase):
    """A file whose bytes are passed to a function while they are read."""

    def __init__(self, file: Any, see: Callable[[memoryview], object]) -> None:
        self._file, self._see = file, see

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        n = self._file.readinto(buffer) or 0
        self._see(memoryview(buffer)[:n])
        return n


class _Remote(io.RawIOBase):
    """A file of fsspec, whose libraries have errors of their own, with `OSError` in their place."""

    def __init__(self, file: Any) -> None:
        self._file, self.size = file, file.size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(place, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        try:
            return self._file.readinto(buffer) or 0
        except OSError:
            raise
        except Exception as error:
            raise OSError(_reason(error)) from error

    def close(self) -> None:
        self._file.close()
        super().close()


def _reason(error: Exception) -> str:
    return message_of(error) or type(error).__name__


def _bounded(file: io.BufferedIOBase, path: Path, stored: Any) -> io.BufferedReader:
    """Decompressed content up to a bound, as a defence against decompression bombs."""
    n, most = 0, max(UNCHECKED_BYTES, MAX_RATIO * _size_of(path, stored))

    def count(content: memoryview) -> None:
        nonlocal n
        n += len(content)
        if n > most:
            raise DataError(
                f"{path}: expands to more than {MAX_RATIO} times its size; refused as a possible decompression bomb; "
                "decompress it yourself if the content is as intended"
            )

    return io.BufferedReader(_Watched(file, count), 1 << 16)


def _size_of(path: Path, file: Any) -> int:
    """Bytes of an open file; sys.maxsize if the server of a remote one does not tell them."""
    return (file.size or sys.maxsize) if remote_url(path) else path.stat().st_size


def _open_remote(url: str) -> Any:
    """Open a file for reading with fsspec. Raises `SettingsError` without the libraries that this needs."""
    try:
        import fsspec
    except ImportError as error:
        raise SettingsError(f"{url}: a remote file needs fsspec: pip install 'transduce[remote]'") from error
    try:
        return _Remote(fsspec.open(url, "rb").open())
    except (ImportError, ValueError) as error:  # no library for the protocol, or no such protocol
        raise SettingsError(f"{url}: {error}; pip install 'transduce[remote]' for https, s3 and hf") from error
    except OSError:
        raise
    except Exception as error:  # each of the libraries has its own
        raise DataError(f"cannot read {url}: {_reason(error)}") from error


COMPRESSIONS: dict[str, Callable[[io.BufferedIOBase], io.BufferedIOBase]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file, mode="rb"),
    ".xz": lambda file: lzma.LZMAFile(cast(IO[bytes], file)),  # noqa: SIM115  (closed by `open_watched`)
    ".zst": lambda file: io.BufferedReader(_ZstdFile(file), 1 << 16),
}

Digests = dict[Path, bytes]
"""The sha256 of files as stored, filled in when a file has been read to its end."""


def remote_url(path: Path) -> str | None:
    """The address of a remote file, `https://host/a.tsv`; None for a local path."""
    scheme, _, rest = path.as_posix().partition(":/")
    return f"{scheme}://{rest}" if is_remote(path) else None


def bare_suffix(path: Path) -> str:
    """The suffix that determines the format, in lower case, without that of a compression: `.tsv` of `a.TSV.gz`."""
    return Path(path.stem if path.suffix.lower() in COMPRESSIONS else path.name).suffix.lower()


def is_missing(path: Path) -> bool:
    """Whether a local file does not exist. Nothing is asked of a server."""
    return remote_url(path) is None and not path.exists()


def check_is_text(path: Path) -> None:
    """Refuse what is not a regular file: a folder, a pipe, a device."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a text file")
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is a pipe or a device; write the text to a file first")


@contextlib.contextmanager
def open_bytes(path: Path, digests: Digests | None = None) -> Iterator[io.BufferedIOBase]:
    """Open a file for reading, decompressed according to its suffix. Missing and damaged files are a `DataError`."""
    with open_watched(path, digests) as (file, _):
        yield file


@contextlib.contextmanager
def open_watched(path: Path, digests: Digests | None = None) -> Iterator[tuple[io.BufferedIOBase, Callable[[], int]]]:
    """Like `open_bytes`, with a function that returns how many bytes of the file have been read so far."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a text file")
    sha256, url = hashlib.sha256(), remote_url(path)
    try:
        with path.open("rb", buffering=0) if url is None else _open_remote(url) as file:
            raw = io.BufferedReader(file if digests is None else _Watched(file, sha256.update), 1 << 16)
            if path.suffix.lower() in COMPRESSIONS:
                with COMPRESSIONS[path.suffix.lower()](raw) as unpacked, _bounded(unpacked, path, file) as bounded:
                    yield bounded, file.tell
            else:
                yield raw, raw.tell if digests is None else file.tell
            if digests is not None:
                while raw.read(1 << 20):  # what a decompressor left unread
                    pass
                digests[path] = sha256.digest()
    except _DAMAGE as error:
        raise DataError(f"{path}: damaged or truncated: {error}") from None
    except OSError as error:
        raise DataError(f"cannot read {url or path}: {error.strerror or error}") from None


def read_lines(path: Path | str, digests: Digests | None = None) -> Iterator[str]:
    r"""Yield the lines of a UTF-8 text file, or of standard input for `-`.

    Lines end at `\n` only, so other separators (U+2028, form feed) stay inside their line. A `\r` before the `\n` and
    a byte order mark at the start are removed. The last line need not end in `\n`. A file of vectors is a `DataError`.
    """
    if str(path) == "-":
        yield from decode_lines(cast(io.BufferedIOBase, sys.stdin.buffer), "standard input")
        return
    for number, raw in enumerate(raw_lines(Path(path), digests), 1):
        yield decode_input(raw, path, number)


def raw_lines(path: Path, digests: Digests | None = None) -> Iterator[bytes]:
    """Yield the lines of a text file as they are stored. A file of vectors is a `DataError`."""
    if is_vectors(path):
        raise DataError(f"{path} is a file of vectors; a text file belongs here")
    with open_bytes(path, digests) as file:
        yield from _lines_of(file, str(path))


def read_inputs(
    path: Path | str, vocabulary: Vocabulary | None = None, digests: Digests | None = None
) -> Iterator[str]:
    """The inputs of a model in a file: the lines of a text file, or the names of the sequences in a file of vectors.

    `vocabulary`: the model's. It raises `DataError` for a file of vectors if it encodes text.
    """
    vectors = open_vectors(path, vocabulary)
    return read_lines(path, digests) if vectors is None else vectors.names


def raw_inputs(path: Path, digests: Digests | None = None) -> Iterator[bytes | str]:
    """Yield the inputs of a model without decoding the lines; `decode_input` decodes them."""
    vectors = open_vectors(path)
    return raw_lines(path, digests) if vectors is None else vectors.names


LineParser = Callable[[str, int], tuple[str, ...] | None]
"""Turns a line and its number into a row, or into None if it is a header. Raises `ValueError`."""


def read_parallel(src: Path, tgt: Path, vocabulary: Vocabulary) -> tuple[list[str], list[str]]:
    """Read the inputs of a model and the lines of a text file, which must be aligned.

    `vocabulary`: the model's. Raises `DataError` if the files differ in length or are empty.
    """
    sources, targets = list(read_inputs(src, vocabulary)), list(read_lines(tgt))
    if len(sources) != len(targets):
        raise DataError(f"{src} has {len(sources):,} lines, {tgt} has {len(targets):,}; they must be aligned")
    if not sources:
        raise DataError(f"{src} is empty")
    return sources, targets


def read_rows(
    path: Path | str, parse: LineParser, digests: Digests | None = None
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the rows of a file that has one per line, each with its line number. `DataError` names a faulty line."""
    for number, line in enumerate(read_lines(path, digests), 1):
        try:
            row = parse(line, number)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
        if row is not None:
            yield number, row


def one_line(text: str) -> str:
    """Replace line breaks inside a sentence, which JSON and XML allow, and the white space around them by a space."""
    if "\n" not in text and "\r" not in text:
        return text
    return _SPACES.sub(lambda found: " " if {"\n", "\r"} & {*found[0]} else found[0], text.strip("\r\n"))


def decode_lines(file: io.BufferedIOBase, name: str) -> Iterator[str]:
    """Decode the lines of an open file; a `DataError` names a line that is not UTF-8 or is too long."""
    for number, raw in enumerate(_lines_of(file, name), 1):
        yield decode_input(raw, name, number)


def _lines_of(file: io.BufferedIOBase, name: str) -> Iterator[bytes]:
    for number in itertools.count(1):
        if not (raw := file.readline(MAX_LINE)):
            return
        if len(raw) == MAX_LINE and not raw.endswith(b"\n"):
            raise DataError(f"{name}, line {number}: {TOO_LONG}")
        yield raw


def decode_input(raw: bytes | str, name: Path | str, number: int) -> str:
    """Decode a line of a file, or return a name of vectors. A `DataError` names a line that is not UTF-8."""
    if isinstance(raw, str):
        return raw
    try:
        return decode_line(raw, first=number == 1)
    except ValueError as error:
        raise DataError(f"{name}, line {number}: {error}") from None


def decode_block(lines: Sequence[bytes | str], *, first: bool) -> list[str] | None:
    """Decode many lines at once, or return None if one is faulty; `decode_input` then names it.

    `first`: they are the first ones of a file.
    """
    raw = [line for line in lines if isinstance(line, bytes)]
    data = b"".join(raw)
    if len(raw) < len(lines) or first or b"\r" in data:
        with contextlib.suppress(ValueError):
            return [
                line if isinstance(line, str) else decode_line(line, first=first and not i)
                for i, line in enumerate(lines)
            ]
        return None
    with contextlib.suppress(UnicodeDecodeError):
        text = data.decode("utf-8").split("\n")
        return text if text[-1] else text[:-1]
    return None


def decode_line(raw: bytes, *, first: bool) -> str:
    """Decode a line, without its end and, if it is the `first`, a byte order mark. Raises `ValueError`."""
    raw = raw.removeprefix(_BOM) if first else raw
    raw = raw[:-1].removesuffix(b"\r") if raw.endswith(b"\n") else raw
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(_explain(raw, error, first=first)) from None


def _explain(raw: bytes, error: UnicodeDecodeError, *, first: bool) -> str:
    """What is wrong with the bytes of a line. UTF-16 files begin with a byte order mark."""
    if first and raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "this is UTF-16, not UTF-8; convert it, for instance with iconv -f UTF-16 -t UTF-8"
    return f"not valid UTF-8 (byte 0x{raw[error.start]:02x} at byte {error.start + 1} of the line); convert it to UTF-8"
