"""The chunks of a bulk translation, and what translates them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import transduce
from transduce.bulk.journal import Shard
from transduce.config.decoding import DecodingOptions
from transduce.decoding.loading import AnyPrecision
from transduce.decoding.results import Note, Style, format_rows, note_on
from transduce.decoding.translator import Translator
from transduce.errors import RunFolderError
from transduce.runs.folder import RunFolder


class Chunk(NamedTuple):
    """Lines of a file, or its end (no lines); `first`: lines before; `read`: bytes of the file up to here."""

    shard: Shard
    first: int
    lines: list[str]
    read: int


class Translated(NamedTuple):
    """Rows of output, and notes."""

    rows: list[str]
    notes: list[Note]


class ChunkTranslator:
    """Translates lists of lines into rows of output.

    Attributes:
        how: Everything that the output depends on, for JSON.
        notes: See `EngineChoice.notes`.
    """

    def __init__(
        self,
        run: str | Path,
        options: DecodingOptions,
        *,
        style: Style = "text",
        device: str = "auto",
        precision: AnyPrecision = "float32",
    ) -> None:
        """Load the model; see `translate_to_folder`. Raises the errors of `Translator.load`."""
        self._options, self._style = options.model_copy(update={"scores": style != "text"}), style
        identity = RunFolder.open(Path(run)).model_digest()
        self._translator = Translator.load(run, device=device, precision=precision)
        if RunFolder.open(Path(run)).model_digest() != identity:
            raise RunFolderError(f"{run} was changed while it was loaded; wait until its training has ended")
        self.notes = self._translator.choice.notes()
        # A translation does not depend on its batch.
        given = self._options.model_dump(exclude_unset=True, exclude={"batch_tokens"})
        self.how = {
            "transduce": transduce.__version__,
            "run": identity,
            "style": style,
            "precision": self._translator.choice.precision,
            "shortlist of": self._translator.shortlist().digest if self._options.shortlist else "",
            "engine": f"{type(self._translator.engine).__name__} on {self._translator.device}",
            **given,
        }

    def translate(self, first: int, lines: list[str]) -> Translated:
        """Translate lines; `first` is the number of lines before them in their file."""
        rows: list[str] = []
        notes = []
        translations = self._translator.translate_lines(lines, self._options, first=first)
        for number, (src, one) in enumerate(zip(lines, translations, strict=True), first + 1):
            rows += format_rows(self._style, number, src, one, n_best=self._options.n_best)
            if note := note_on(self._style, number, src, one):
                notes.append(note)
        return Translated(rows, notes)

    def __call__(self, chunk: tuple[int, list[str]]) -> Translated:
        return self.translate(*chunk)

    def translate_all(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Translated]]:
        """Translate chunks in order."""
        for chunk in chunks:
            yield chunk, self.translate(chunk.first, chunk.lines)
