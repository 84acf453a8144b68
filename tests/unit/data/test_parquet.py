"""Parquet, and remote files on a server on loopback."""

import builtins
import functools
import gzip
import http.server
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from transduce.config.settings import Corpus, DataSettings, Settings
from transduce.data.lines import content_mark
from transduce.data.pairs import Pair, read_pairs
from transduce.data.reading import pair_sources
from transduce.errors import DataError, SettingsError

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")

PAIRS = [("A dog.", "Ein Hund."), ("", "leer"), ("two\nlines", "zwei Zeilen")]
READ = [("A dog.", "Ein Hund."), ("", "leer"), ("two lines", "zwei Zeilen")]


def table(*, nested: bool = False, n: int = 3) -> Any:
    rows = [{"en": en, "de": de} for en, de in PAIRS[:n]]
    return pa.Table.from_pylist([{"translation": row} if nested else {**row, "id": 7} for row in rows])


def pairs(path: Path | str) -> list[Pair]:
    return list(read_pairs(Corpus(path=Path(path)), DataSettings(src_lang="en", tgt_lang="de")))


def texts(path: Path | str) -> list[tuple[str, str]]:
    return [(pair.src, pair.tgt) for pair in pairs(path)]


@pytest.mark.parametrize("nested", [False, True])
def test_parquet(tmp_path: Path, nested: bool) -> None:
    pa.parquet.write_table(table(nested=nested), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == READ
    assert pairs(tmp_path / "a.parquet")[1].where == f"{tmp_path}/a.parquet:2"


def test_damaged_files_and_other_columns_are_one_line_errors(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(DataError, match=r"a\.parquet: not a valid parquet file"):
        texts(tmp_path / "a.parquet")
    pa.parquet.write_table(table().rename_columns(["en", "fr", "id"]), tmp_path / "b.parquet")
    with pytest.raises(
        DataError, match=r'b\.parquet, row 1: no source and target: expected .*\{"en": "...", "de": "..."\}'
    ):
        texts(tmp_path / "b.parquet")


def without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    original = builtins.__import__

    def refuse(wanted: str, *args: Any, **options: Any) -> Any:
        if wanted.partition(".")[0] == name:
            raise ImportError(name)
        return original(wanted, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa.parquet.write_table(table(), tmp_path / "a.parquet")
    without(monkeypatch, "pyarrow")
    with pytest.raises(SettingsError, match=r"needs pyarrow: pip install 'transduce\[formats\]'"):
        texts(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(SettingsError, match=r"s3://host/a\.tsv: .* pip install 'transduce\[remote\]'"):
        texts("s3://host/a.tsv")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Serves the test's folder."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.mark.loopback
def test_remote_files(tmp_path: Path, server: str) -> None:
    pytest.importorskip("aiohttp")
    pa.parquet.write_table(table(), tmp_path / "a.parquet")
    for name in ("a.tsv", "b.tsv"):
        (tmp_path / name).write_text("A dog.\tEin Hund.\n" * 3)
    (tmp_path / "a.en.gz").write_bytes(gzip.compress(b"A dog.\nA cat.\n"))
    (tmp_path / "a.de").write_bytes(b"Ein Hund.\nEine Katze.\n")
    assert texts(f"{server}/a.tsv") == [("A dog.", "Ein Hund.")] * 3
    assert sorted(texts(f"{server}/a.parquet")) == sorted(READ)
    train = [{"src": f"{server}/a.en.gz", "tgt": f"{server}/a.de"}]
    settings = Settings.from_mapping({"data": {"train": train}}).resolve_paths(tmp_path)
    (source,) = pair_sources(settings).train
    assert [pair.tgt for pair in source.read()] == ["Ein Hund.", "Eine Katze."]
    before = source.mark()
    assert source.mark() == before
    (tmp_path / "a.de").write_bytes(b"Ein Hund.\nEine Maus.\n")
    assert source.mark() != before
    with pytest.raises(DataError, match=rf"cannot read {server}/missing\.tsv"):
        texts(f"{server}/missing.tsv")


class Breaks(http.server.BaseHTTPRequestHandler):
    """Announces more than it sends."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(b"A dog.\tEin Hund.\n" * 100)

    do_HEAD = do_GET


@pytest.mark.loopback
@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_a_lost_connection_is_a_one_line_error(name: str) -> None:
    pytest.importorskip("aiohttp")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Breaks) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{running.server_port}/{name}"
        with pytest.raises(DataError, match=url) as caught:
            texts(url)
        running.shutdown()
    assert "\n" not in str(caught.value)


ENDED = threading.Event()


class Serves(http.server.BaseHTTPRequestHandler):
    """An error, silence, or pairs in two halves with a pause between them, as the path says."""

    def do_GET(self) -> None:
        if self.path == "/error.tsv":
            self.send_error(503)
            return
        if self.path == "/silence.tsv":
            ENDED.wait(60)
            return
        half = b"A dog.\tEin Hund.\n" * 50
        self.send_response(200)
        self.send_header("Content-Length", str(2 * len(half)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(half)
            self.wfile.flush()
            time.sleep(0.2)
            self.wfile.write(half)

    do_HEAD = do_GET


@pytest.mark.loopback
def test_a_server_may_be_slow_but_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors say what the server did. A short pause is within the limit, silence is not."""
    pytest.importorskip("aiohttp")
    monkeypatch.setattr("transduce.data.lines._SECONDS", 2)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Serves) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{running.server_port}"
        assert texts(f"{url}/a.tsv") == [("A dog.", "Ein Hund.")] * 100
        with pytest.raises(DataError, match=rf"cannot read {url}/error\.tsv: 503 Service Unavailable"):
            texts(f"{url}/error.tsv")
        with pytest.raises(DataError, match=rf"cannot read {url}/silence\.tsv: Timeout on reading"):
            texts(f"{url}/silence.tsv")
        ENDED.set()
        running.shutdown()
    with pytest.raises(DataError, match=rf"cannot read {url}/a\.tsv: Cannot connect to host"):
        texts(f"{url}/a.tsv")


@pytest.mark.loopback
@pytest.mark.parametrize("says_so", [False, True])
def test_large_files_of_a_server_that_sends_no_parts(
    tmp_path: Path, server: str, says_so: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text is read from the start to the end; parquet needs parts."""
    pytest.importorskip("aiohttp")
    handler = http.server.SimpleHTTPRequestHandler
    if says_so:
        end = handler.end_headers
        monkeypatch.setattr(handler, "end_headers", lambda self: (self.send_header("Accept-Ranges", "none"), end(self)))
    written = [(f"{number:0200}", f"{-number:0200}") for number in range(20_000)]
    (tmp_path / "a.tsv").write_text("".join(f"{src}\t{tgt}\n" for src, tgt in written))
    assert texts(f"{server}/a.tsv") == written
    before = content_mark(Path(f"{server}/a.tsv"))
    (tmp_path / "a.tsv").write_text("another text")
    assert content_mark(Path(f"{server}/a.tsv")) != before
    random = [os.urandom(100).hex() for _ in range(60_000)]
    pa.parquet.write_table(pa.table({"src": random, "tgt": random}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"{server}/a\.parquet: its server sends no parts of files"):
        texts(f"{server}/a.parquet")


def test_an_unknown_protocol_is_a_one_line_error() -> None:
    with pytest.raises(SettingsError, match="nonsense"):
        texts("nonsense://host/a.tsv")


def test_columns_of_parquet_that_are_not_asked_for_are_not_read(tmp_path: Path) -> None:
    table_with_more = (
        table().append_column("src", pa.array([None, None, None])).append_column("x", pa.array([b"\xff"] * 3))
    )
    pa.parquet.write_table(table_with_more, tmp_path / "a.parquet", row_group_size=2)
    assert texts(tmp_path / "a.parquet") == READ
