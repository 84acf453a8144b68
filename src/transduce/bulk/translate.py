"""Bulk translation of many or large files into a folder. It resumes after a kill at any moment.

    OUT/NAME                         the translation of NAME, once it is complete
    OUT/.transduce/NAME.partial      the translated chunks, while it is incomplete
    OUT/.transduce/NAME.journal      a line of JSON with model, options and input, then a line per finished chunk

A chunk is synced to the disk before its line is written to the journal. Output beyond the last line, which a kill may
leave, is cut off when the translation resumes. Compressed output is one gzip member, xz stream or zstd frame per chunk,
so that it can be cut off too.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import lzma
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import transduce
from transduce.bulk.ray_cluster import RayCluster, RayNodes
from transduce.config.decoding import DecodingKeywords, DecodingOptions
from transduce.config.settings import Corpus, Settings
from transduce.data.lines import check_is_file, check_is_text, decode_lines, open_bytes, zstd
from transduce.decoding.open_run import AnyPrecision, RunPaths, identity_of, list_runs
from transduce.decoding.results import Note, Notes, Style, format_rows, note_on
from transduce.decoding.translator import Translator, chunks
from transduce.errors import DataError, RunFolderError, SettingsError
from transduce.kernels.library import instruction_set
from transduce.logging import Log
from transduce.process import interrupted_by
from transduce.runs.atomic import sync, write_text
from transduce.runs.lock import locked_folder
from transduce.text.languages import Languages

FOLDER = ".transduce"

_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".xz": lzma.compress,
    ".zst": zstd.compress,
}


@dataclass(frozen=True, slots=True)
class JournalPosition:
    """Progress in a file: lines translated, bytes of output, and bytes of input read. `done`: the file is complete."""

    lines: int = 0
    bytes: int = 0
    read: int = 0
    done: bool = False

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> JournalPosition | None:
        """Convert a line of the journal, parsed as JSON, to a position. Returns None if the line is damaged."""
        names_and_types = {name: type(value) for name, value in asdict(cls()).items()}
        valid = {name: type(value) for name, value in record.items()} == names_and_types and min(record.values()) >= 0
        return cls(**record) if valid else None


class OutputFile:
    """The output of one input file, complete or in progress."""

    def __init__(self, source: Path, output_dir: Path, how: Mapping[str, Any]) -> None:
        """Find the position at which to resume, without writing anything.

        `how`: all values that determine the translation, in JSON types. Raises `DataError` if the output is not from
        a bulk translation, or was begun with a different `how` or input.
        """
        self.source, self.output = source, output_dir / source.name
        of_file = output_dir / FOLDER / source.name
        self._partial, self._journal = (of_file.with_name(f"{source.name}.{kind}") for kind in ("partial", "journal"))
        self._compress = _COMPRESS.get(source.suffix.lower(), bytes)
        self._header = {**how, "input": self._describe_input()}
        self.size: int = self._header["input"]["bytes"]
        self._journal_end = 0
        self._output_existed = os.path.lexists(self.output)
        self.position = self._find_position()
        self.was_done = self.position.done

    def append(self, rows: list[str], *, n_lines: int, read: int) -> None:
        """Write the translation of the next `n_lines` lines. `read`: bytes of the input up to the last line's end."""
        before = self.position
        if before == JournalPosition():  # write the journal first: an old journal must never describe new output
            self._partial.touch()
            write_text(self._journal, f"{json.dumps(self._header)}\n")
            self._journal_end = self._journal.stat().st_size
        data = self._compress("".join(f"{row}\n" for row in rows).encode())
        end = _write(self._partial, before.bytes, data)
        self._record(JournalPosition(before.lines + n_lines, end, read))

    def finish(self) -> None:
        """Rename the complete output to its final name.

        Raises `DataError` if, in the meantime, the input was changed or another program wrote a file of this name.
        """
        if self._output_existed:
            return
        if os.path.lexists(self.output):
            raise self._foreign_output()
        if not self.position.done:
            if self.position.lines == 0:
                self.append([], n_lines=0, read=0)  # even an empty compressed stream has a few bytes
            if self._describe_input() != self._header["input"]:
                raise DataError(
                    f"{self.source} was changed while it was translated; remove {self._journal} to translate it again"
                )
            _write(self._partial, self.position.bytes, b"")
            self._record(replace(self.position, read=self.size, done=True))
        os.replace(self._partial, self.output)
        sync(self.output.parent)

    def _describe_input(self) -> dict[str, int]:
        stat = self.source.stat()
        return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}

    def _find_position(self) -> JournalPosition:
        """Return the last position in the journal that the existing output reaches."""
        if link := next((path for path in (self._partial, self._journal) if path.is_symlink()), None):
            raise DataError(f"{link} is a link and not a file of ours; remove it")
        written = self.output if self._output_existed else self._partial
        n_written = written.stat().st_size if written.is_file() else -1
        records = _read_records(self._journal)
        saved, self._journal_end = next(records, (None, 0))
        position = JournalPosition()
        for record, end in records:
            following = JournalPosition.from_record(record)
            if following is None or following.bytes > n_written:
                break
            position, self._journal_end = following, end
        complete = position.done and position.bytes == n_written
        if self._output_existed and not complete:
            raise self._foreign_output()
        if saved is None or not written.exists() or (position.done and not complete):  # new, or its output was removed
            return JournalPosition()
        self._check(saved)
        return position

    def _foreign_output(self) -> DataError:
        return DataError(
            f"{self.output} exists, and is not the complete translation of {self.source} by this command; remove it, "
            "or name another output_dir",
            "output_dir",
        )

    def _check(self, saved: Mapping[str, Any]) -> None:
        """Raise `DataError` if `saved`, the journal's first line, has another model, other options or another input."""
        differences = [
            {
                "input": f"another version of {self.source}, with another size or time of change",
                "run": "another model",
            }.get(name, f"{name} = {saved.get(name)!r} and not {value!r}")
            for name, value in self._header.items()
            if saved.get(name) != value
        ]
        if differences:
            begun, remove = ("made", self.output) if self.output.exists() else ("begun", self._journal)
            raise DataError(
                f"{self.output} was {begun} with {', '.join(differences)}; undo the change, name another output_dir, "
                f"or remove {remove} to translate the file again",
                "output_dir",
            )

    def _record(self, position: JournalPosition) -> None:
        line = f"{json.dumps(asdict(position))}\n"
        self._journal_end = _write(self._journal, self._journal_end, line.encode())
        self.position = position


def _write(path: Path, end: int, data: bytes) -> int:
    """Replace the content of a file after byte `end` by `data`, and sync it to the disk. Returns the new end."""
    with path.open("r+b") as file:
        file.truncate(end)
        file.seek(end)
        file.write(data)
    sync(path)
    return end + len(data)


def _read_records(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the JSON objects of a journal, each with the byte where it ends, up to the first incomplete line."""
    end = 0
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            value = None
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(line)
            if not isinstance(value, dict) or not line.endswith(b"\n"):
                return
            end += len(line)
            yield value, end


CHUNK_LINES = 1024  # lines per chunk; a kill loses the chunk in progress

_DEFAULT = DecodingOptions()


class Chunk(NamedTuple):
    """Consecutive lines of an input file. A chunk without lines marks the end of the file.

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
    """Translate each file into a file of the same name and compression in `output_dir`. Returns the output files.

    The files may be of any size: only a few chunks of 1,024 lines are in memory. An output file gets its name when it
    is complete. After a kill, an error or a signal, the same call resumes, and the output equals the output of an
    uninterrupted call, byte for byte. Finished files are not translated again.

    Args:
        run: The run folder, or several run folders for an ensemble; see `Translator.load`.
        files: Text files with one sentence per line, plain or compressed, with distinct names.
        output_dir: Folder of the output, created if it does not exist. Its subfolder `.transduce` has the journals.
        options: Decoding options as an object.
        style: Format of the output of a line; see `format_rows`.
        cluster: Translate on the nodes of a Ray cluster (default: in this process, with a thread per core).
        device: auto, cpu or cuda.
        precision: See `Translator.load`.
        languages: Source and target language; see `Translator.between`.
        log: Log for progress (default: to stderr).
        decoding: Decoding options as keywords, such as `beam=5`, which override `options`.

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
    """Yield the remaining chunks of all files in one stream, so that nodes do not wait for the end of a file."""
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
    """Raise `UserError` for files that cannot be translated. Called before anything is written or loaded."""
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


def with_back_translations(settings: Settings, folder: Path, log: Log) -> Settings:
    """Translate the texts of `data.monolingual` into the source language, and move the pairs to `data.train`.

    This is back-translation (Sennrich et al. 2016). `data.monolingual` of the result is empty, so that a distillation
    from the run does not translate the texts again. The translations are written into `folder`, one subfolder for each
    text. After a kill, the same call resumes. Raises `UserError` if a model or a text cannot be used.
    """
    data, pairs = settings.data, list[Corpus]()
    for number, text in enumerate(data.monolingual, 1):
        log.say(f"translating {text.tgt} with {text.model} into {folder}")
        decoding = {"sample": True} if text.sample else {"beam": text.beam}
        [src] = translate_to_folder(
            text.model,
            [text.tgt],
            folder / str(number),
            languages=data.named_languages[::-1],
            device=settings.training.device,
            log=log,
            **decoding,
        )
        pairs.append(Corpus(src=src, tgt=text.tgt, weight=text.weight))
    return settings.with_values("data", train=[*data.train, *pairs], monolingual=())
