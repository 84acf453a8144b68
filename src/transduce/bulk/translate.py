"""Bulk translation: many files, or large ones, into a folder; resumable after a kill at any moment."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Unpack

import transduce
from transduce.bulk.journal import FOLDER, OutputFile
from transduce.bulk.ray_cluster import RayCluster, RayNodes
from transduce.config.decoding import DecodingKeywords, DecodingOptions
from transduce.data.lines import check_is_file, check_is_text, decode_lines, open_bytes
from transduce.decoding.open_run import AnyPrecision, RunPaths, identity_of, list_runs
from transduce.decoding.results import Note, Notes, Style, format_rows, note_on
from transduce.decoding.translator import Translator, chunks
from transduce.errors import DataError, RunFolderError, SettingsError
from transduce.kernels.library import instruction_set
from transduce.logging import Log
from transduce.process import interrupted_by
from transduce.runs.lock import locked_folder
from transduce.text.languages import Languages

CHUNK_LINES = 1024  # lost by a kill

_DEFAULT = DecodingOptions()


class Chunk(NamedTuple):
    """Lines of an input file. A chunk without lines marks the end of the file.

    file: Index of the file. first: Number of lines before the chunk. read: Bytes of the file up to the chunk's end.
    """

    file: int
    first: int
    lines: list[str]
    read: int


Translated = tuple[list[str], list[Note]]
"""The rows of output for a chunk, and notes on its lines."""


class ChunkTranslator:
    """Translates lists of lines into rows of output.

    Attributes:
        how: All values that determine the output, in JSON types.
        notes: See `EngineChoice.notes`.
    """

    def __init__(
        self,
        run: RunPaths,
        options: DecodingOptions,
        *,
        style: Style = "text",
        device: str = "auto",
        precision: AnyPrecision = "float32",
        languages: Languages = (None, None),
    ) -> None:
        """Load the model; see `translate_to_folder`. Raises the errors of `Translator.load`."""
        self._options, self._style = options.model_copy(update={"scores": style != "text"}), style
        identity = identity_of(run)
        self._translator = Translator.load(run, device=device, precision=precision).between(*languages)
        if identity_of(run) != identity:
            names = ", ".join(map(str, list_runs(run)))
            raise RunFolderError(f"{names} was changed while it was loaded; wait until its training has ended")
        self.notes = [*self._translator.choice.notes(), *self._translator.direction_notes()]
        # A translation does not depend on its batch.
        given = self._options.model_dump(exclude_unset=True, exclude={"batch_tokens"})
        self.how = {
            "transduce": transduce.__version__,
            "run": identity,
            "style": style,
            "precision": self._translator.choice.precision,
            "engine": f"{type(self._translator.engine).__name__} on {self._translator.device}",
            **given,
        }
        if self._translator.tokenizers.src.framing.needed:
            self.how["languages"] = list(self._translator.languages)
        if self._translator.choice.precision == "int8":  # sums in int8 differ between instruction sets
            self.how["instruction set"] = instruction_set()

    def __call__(self, chunk: Chunk) -> Translated:
        rows, notes = list[str](), list[Note]()
        translations = self._translator.translate_lines(chunk.lines, self._options, first=chunk.first)
        for number, (src, translation) in enumerate(zip(chunk.lines, translations, strict=True), chunk.first + 1):
            rows += format_rows(self._style, number, src, translation, n_best=self._options.n_best)
            if note := note_on(self._style, number, src, translation):
                notes.append(note)
        return rows, notes

    def map(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Translated]]:
        for chunk in chunks:
            yield chunk, self(chunk)


def translate_to_folder(
    run: RunPaths,
    files: Sequence[str | Path],
    output_dir: str | Path,
    options: DecodingOptions = _DEFAULT,
    *,
    style: Style = "text",
    cluster: RayCluster | None = None,
    device: str = "auto",
    precision: AnyPrecision = "float32",
    languages: Languages = (None, None),
    log: Log | None = None,
    **decoding: Unpack[DecodingKeywords],
) -> list[Path]:
    """Translate each file into a file of the same name and compression in `output_dir`; return the output files.

    The files may be of any size: only a few chunks of 1,024 lines are in memory. An output file gets its name when it
    is complete. After a kill, an error or a signal, the same call resumes, and the output is that of an uninterrupted
    call, byte for byte. Finished files are not translated again.

    Args:
        run: The run folder, or several of an ensemble; see `Translator.load`.
        files: Text files with one sentence per line, plain or compressed, with distinct names.
        output_dir: Folder of the output, created if it does not exist. Its subfolder `.transduce` has the journals.
        options: Decoding options as an object.
        style: Form of the output of a line; see `format_rows`.
        cluster: Translate on the nodes of a Ray cluster (default: in this process, with a thread per core).
        device: auto, cpu or cuda.
        precision: See `Translator.load`.
        languages: Source and target language; see `Translator.between`.
        log: For progress (default: to stderr).
        decoding: Decoding options as keywords, such as `beam=5`, which replace those of `options`.

    Raises:
        UserError: The run or a file cannot be used, or `output_dir` contains files of another call. The message says
            what to do.
        Interrupted: SIGINT, SIGTERM or SIGHUP. The same call resumes.
    """
    sources, folder, log = [Path(file) for file in files], Path(output_dir), log or Log()
    _check_files(sources, folder)
    options = options.with_values(**decoding)
    runs = [run if cluster is None else run.absolute() for run in list_runs(run)]
    make = partial(ChunkTranslator, runs, options, style=style, device=device, precision=precision, languages=languages)
    gpus = device != "cpu"
    locked = locked_folder(folder / FOLDER, use="translating into it")
    interrupted = interrupted_by("SIGINT", "SIGTERM", "SIGHUP", then="the same command resumes")
    with (
        interrupted as check_signals,
        locked,
        nullcontext(make()) if cluster is None else replace(cluster, log=log).start(make, gpus=gpus) as translator,
    ):
        for note in translator.notes:
            log.say(note)
        outputs = [OutputFile(source, folder, translator.how) for source in sources]
        _translate(outputs, translator, log, check_signals)
    return [file.output for file in outputs]


def _read_chunks(files: Sequence[OutputFile]) -> Iterator[Chunk]:
    """Yield the remaining chunks of all files. In one stream, nodes need not wait for the end of a file."""
    for number, file in enumerate(files):
        first = file.position.lines
        if not file.position.done:
            with open_bytes(file.source) as (content, n_read):
                lines = decode_lines(content, str(file.source))
                deque(itertools.islice(lines, first), maxlen=0)
                for chunk in chunks(lines, n_lines=CHUNK_LINES):
                    yield Chunk(number, first, chunk, n_read())
                    first += len(chunk)
        yield Chunk(number, first, [], file.size)


def _translate(
    files: Sequence[OutputFile], translator: ChunkTranslator | RayNodes, log: Log, check_signals: Callable[[], None]
) -> None:
    began, total, n_lines = time.monotonic(), max(1, sum(file.size for file in files)), 0
    n_read, n_finished = sum(file.position.read for file in files), sum(file.was_done for file in files)
    notes = Notes(log)
    if n_finished:
        log.say(f"resuming: {n_finished:,} of {len(files):,} files are finished")
    with log.progress("translating") as bar:
        bar.update(n_read / total)
        for chunk, (rows, line_notes) in translator.map(_read_chunks(files)):
            file = files[chunk.file]
            before = file.position.read
            if chunk.lines:
                file.append(rows, n_lines=len(chunk.lines), read=chunk.read)
                for note in line_notes:
                    notes.show(note, file=f"{file.source}, ")
            else:
                file.finish()
            n_lines, n_read = n_lines + len(chunk.lines), n_read + file.position.read - before
            speed = n_lines / max(1e-9, time.monotonic() - began)
            bar.update(n_read / total, note=f"{n_lines:,} lines  {speed:,.0f} sentences/s")
            check_signals()
    notes.close(n_lines)
    log.say(f"{n_lines:,} lines translated in {len(files) - n_finished:,} files")


def _check_files(sources: Sequence[Path], folder: Path) -> None:
    """Raise `UserError` for files that cannot be translated, before anything is written or loaded."""
    if not sources:
        raise SettingsError("output_dir needs the names of files to translate", "output_dir")
    names: dict[str, Path] = {}
    for source in sources:
        if str(source) == "-":
            raise SettingsError(
                "output_dir: standard input cannot be resumed; write the text to a file first", "output_dir"
            )
        check_is_file(source)
        if not source.exists():
            raise DataError(f"there is no file {source}")
        check_is_text(source)
        if source.resolve().is_relative_to(folder.resolve()):
            raise DataError(f"{source} is inside output_dir {folder}; name another folder", "output_dir")
        if names.setdefault(source.name, source) is not source:
            raise DataError(
                f"{names[source.name]} and {source} have the same name; translate them into different folders"
            )
