"""Text files as streams of lines: plain, .gz, .xz or .zst, strict UTF-8, cut at newlines and nowhere else.

Memory stays bounded whatever the file holds, and every fault names the file and, where there is one, the line.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

import zstandard

from transduce.errors import DataError

MAX_LINE = 1 << 24
"""Bytes of the longest line that is still taken for text: 16 MiB."""
TOO_LONG = f"longer than {MAX_LINE >> 20} MiB; is this a text file?"

MOST_RATIO, FREE = 100, 1 << 26
"""A packed file may become so many times larger, once it is beyond 64 MiB: text becomes 3 to 30 times larger."""

_BOM = b"\xef\xbb\xbf"
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstandard.ZstdError)


class _ZstdFile(io.RawIOBase):
    """Reads .zst frames one after another. Unlike zstandard's own reader it does not take a cut-off file for whole."""

    _CHUNK = 512  # bytes read at once: of a bomb these become 16 MiB at most

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

    def close(self) -> None:
        self._file.close()
        super().close()


class _Bounded(io.RawIOBase):
    """What a packed file holds, up to a bound: no text is packed as well as a decompression bomb."""

    def __init__(self, file: io.RawIOBase | io.BufferedIOBase, path: Path) -> None:
        self._file, self._path, self._n = file, path, 0
        self._most = max(FREE, MOST_RATIO * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        n = self._file.readinto(buffer) or 0
        self._n += n
        if self._n > self._most:
            raise DataError(
                f"{self._path}: unpacks to more than {MOST_RATIO} times its size, which no text does; refused for "
                "safety: unpack it by other means if it is what you want"
            )
        return n

    def close(self) -> None:
        self._file.close()
        super().close()


def _open_plain(file: io.BufferedIOBase) -> io.BufferedIOBase:
    return file


def _open_zst(file: io.BufferedIOBase) -> io.BufferedIOBase:
    return io.BufferedReader(_ZstdFile(file), 1 << 16)


def _open_gz(file: io.BufferedIOBase) -> io.BufferedIOBase:
    return gzip.GzipFile(fileobj=file, mode="rb")


def _open_xz(file: io.BufferedIOBase) -> io.BufferedIOBase:
    return lzma.LZMAFile(cast(IO[bytes], file))


Opener = Callable[[io.BufferedIOBase], io.BufferedIOBase]
COMPRESSIONS: dict[str, Opener] = {".gz": _open_gz, ".xz": _open_xz, ".zst": _open_zst}


def bare_suffix(path: Path) -> str:
    """The suffix that tells the format, in lower case, compression aside: `.tsv` of `a.TSV.gz`."""
    return Path(path.stem if path.suffix.lower() in COMPRESSIONS else path.name).suffix.lower()


def check_is_text(path: Path) -> None:
    """Refuse what cannot be read as often as a training reads its text: a folder, a pipe, a device."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a text file")
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is no file but a pipe or a device; write the text to a file first")


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open a file for reading, decompressed by its suffix. Missing and damaged files become a `DataError`."""
    with open_watched(path) as (file, _):
        yield file


@contextlib.contextmanager
def open_watched(path: Path) -> Iterator[tuple[io.BufferedIOBase, Callable[[], int]]]:
    """As `open_bytes`; the function tells how many bytes of the file as it lies there have been read so far."""
    path = Path(path)
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a text file")
    try:
        opener = COMPRESSIONS.get(path.suffix.lower())
        with path.open("rb") as raw, opener(raw) if opener else _open_plain(raw) as unpacked:
            yield (
                (cast(io.BufferedIOBase, io.BufferedReader(_Bounded(unpacked, path), 1 << 16)) if opener else unpacked),
                raw.tell,
            )
    except _DAMAGE as error:
        raise DataError(f"{path}: damaged or cut short: {error}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def read_lines(path: Path | str) -> Iterator[str]:
    r"""Yield the lines of a UTF-8 text file, or of standard input for `-`.

    Cut at `\n` only, so other separators (U+2028, form feed) stay inside their line. A `\r` before the `\n` and a
    byte order mark at the start are dropped. A last line without `\n` counts.
    """
    if str(path) == "-":
        yield from decode_lines(cast(io.BufferedIOBase, sys.stdin.buffer), "standard input")
        return
    with open_bytes(Path(path)) as file:
        yield from decode_lines(file, str(path))


def decode_lines(file: io.BufferedIOBase, name: str) -> Iterator[str]:
    """The lines of an open file, strictly decoded; a `DataError` names the line that is not UTF-8 or has no end."""
    number = 0
    while raw := file.readline(MAX_LINE):
        number += 1
        if not raw.endswith(b"\n") and len(raw) == MAX_LINE:
            raise DataError(f"{name}, line {number}: {TOO_LONG}")
        try:
            yield decode_line(raw, first=number == 1)
        except ValueError as error:
            raise DataError(f"{name}, line {number}: {error}") from None


def decode_line(raw: bytes, *, first: bool) -> str:
    """The text of a line, without its end and, of the `first`, a byte order mark; a `ValueError` says what is wrong."""
    raw = raw.removeprefix(_BOM) if first else raw
    raw = raw[:-1].removesuffix(b"\r") if raw.endswith(b"\n") else raw
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(_explain(raw, error, first=first)) from None


def _explain(raw: bytes, error: UnicodeDecodeError, *, first: bool) -> str:
    """What is wrong with the bytes of a line. A mark of UTF-16 stands at the beginning of a file."""
    if first and raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "this is UTF-16, not UTF-8; convert it, for instance with iconv -f UTF-16 -t UTF-8"
    return f"not valid UTF-8 (byte 0x{raw[error.start]:02x} at byte {error.start + 1} of the line)"
