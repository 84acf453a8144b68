"""Bulk translation: many files, or large ones, into a folder; resumable after a kill at any moment."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from transduce.bulk.chunks import Chunk, ChunkTranslator
from transduce.bulk.journal import FOLDER, Shard
from transduce.bulk.ray_cluster import RayCluster, RayNodes
from transduce.config.decoding import DecodingOptions
from transduce.data.lines import check_is_text, decode_lines, open_bytes
from transduce.decoding.loading import AnyPrecision
from transduce.decoding.results import Notes, Style
from transduce.decoding.translator import chunks
from transduce.errors import DataError, SettingsError
from transduce.logging import Log
from transduce.process import interrupted_by
from transduce.runs.lock import locked_folder
from transduce.text.vectors import is_vectors

CHUNK_LINES = 1024  # lost by a kill

_DEFAULT = DecodingOptions()


def translate_to_folder(
    run: str | Path,
    files: Sequence[str | Path],
    output_dir: str | Path,
    options: DecodingOptions = _DEFAULT,
    *,
    style: Style = "text",
    cluster: RayCluster | None = None,
    device: str = "auto",
    precision: AnyPrecision = "float32",
    log: Log | None = None,
) -> list[Path]:
    """Translate each file into a file of the same name and compression in `output_dir`; returns these.

    The files may be of any size: only a few chunks of 1,024 lines are in memory. A file has its name when it is
    complete. After a kill, an error or a signal, the same call resumes, and the output is that of an uninterrupted
    call, byte for byte. Finished files are not translated again.

    Args:
        run: The run folder.
        files: Text files with one sentence per line, plain or compressed, with distinct names.
        output_dir: Created if it does not exist. Its folder `.transduce` has the journals.
        options: How to translate.
        style: What is written for a line; see `format_rows`.
        cluster: Translate on the nodes of a Ray cluster (default: in this process, with a thread per core).
        device: auto, cpu or cuda.
        precision: See `Translator.load`.
        log: For progress (default: to stderr).

    Raises:
        UserError: The run or a file cannot be used, or files in `output_dir` are not of this call. The message says
            what to do.
        Interrupted: SIGINT, SIGTERM or SIGHUP. The same call resumes.
    """
    sources, folder, log = [Path(file) for file in files], Path(output_dir), log or Log()
    _check_files(sources, folder)
    run = run if cluster is None else os.path.abspath(run)
    make = partial(ChunkTranslator, run, options, style=style, device=device, precision=precision)
    locked = locked_folder(folder / FOLDER, use="translating into it")
    interrupted = interrupted_by("SIGINT", "SIGTERM", "SIGHUP", then="the same command resumes")
    with (
        interrupted as check_signals,
        locked,
        nullcontext(make()) if cluster is None else cluster.start(make, log, gpus=device != "cpu") as translator,
    ):
        for note in translator.notes:
            log.say(note)
        shards = [Shard(source, folder, translator.how) for source in sources]
        _translate(shards, translator, log, check_signals)
    return [shard.output for shard in shards]


def _read_chunks(shards: Sequence[Shard]) -> Iterator[Chunk]:
    """Chunks of all files that remain to be translated, so that nodes need not wait for the end of a file."""
    for shard in shards:
        first = shard.position.lines
        if not shard.position.done:
            with open_bytes(shard.source) as (file, read):
                lines = decode_lines(file, str(shard.source))
                deque(itertools.islice(lines, first), maxlen=0)
                for chunk in chunks(lines, n_lines=CHUNK_LINES):
                    yield Chunk(shard, first, chunk, read())
                    first += len(chunk)
        yield Chunk(shard, first, [], shard.size)


def _translate(
    shards: Sequence[Shard], translator: ChunkTranslator | RayNodes, log: Log, check_signals: Callable[[], None]
) -> None:
    began, total, n_lines = time.monotonic(), max(1, sum(shard.size for shard in shards)), 0
    n_read, n_finished = sum(shard.position.read for shard in shards), sum(shard.was_done for shard in shards)
    notes = Notes(log)
    if n_finished:
        log.say(f"resuming: {n_finished:,} of {len(shards):,} files are finished")
    with log.progress("translating") as bar:
        bar.update(n_read / total)
        for chunk, translated in translator.translate_all(_read_chunks(shards)):
            shard = chunk.shard
            before = shard.position.read
            if chunk.lines:
                shard.append(translated.rows, n_lines=len(chunk.lines), read=chunk.read)
                for note in translated.notes:
                    notes.show(note, file=f"{shard.source}, ")
            else:
                shard.finish()
            n_lines, n_read = n_lines + len(chunk.lines), n_read + shard.position.read - before
            speed = n_lines / max(1e-9, time.monotonic() - began)
            bar.update(n_read / total, note=f"{n_lines:,} lines  {speed:,.0f} sentences/s")
            check_signals()
    notes.close(n_lines)
    log.say(f"{n_lines:,} lines translated in {len(shards) - n_finished:,} files")


def _check_files(sources: Sequence[Path], folder: Path) -> None:
    """Raises `UserError` before anything is written or loaded."""
    if not sources:
        raise SettingsError("output_dir needs the names of files to translate")
    names: dict[str, Path] = {}
    for source in sources:
        if str(source) == "-":
            raise SettingsError("output_dir: standard input cannot be resumed; write the text to a file first")
        check_is_text(source)
        if not source.exists():
            raise DataError(f"there is no file {source}")
        if is_vectors(source):
            raise DataError(f"{source} is a file of vectors; output_dir is for text: translate it into a file")
        if source.resolve().is_relative_to(folder.resolve()):
            raise DataError(f"{source} is inside output_dir {folder}; name another folder")
        if names.setdefault(source.name, source) is not source:
            raise DataError(
                f"{names[source.name]} and {source} have the same name; translate them into different folders"
            )
