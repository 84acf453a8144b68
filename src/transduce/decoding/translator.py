"""Text in, translations out: `Translator`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from transduce.config.decoding import DecodingOptions, DecodingSettings
from transduce.config.section import MAX_TOKENS
from transduce.data.examples import Example
from transduce.decoding.alignment import Alignment, Heads, Link, WordRule, find_links, guided_head, words_of_tokens
from transduce.decoding.engine import DecodingInput, Engine, Hypothesis
from transduce.decoding.loading import GIVEN, AnyPrecision, EngineChoice, EngineModel, open_engine
from transduce.decoding.results import Candidate, TextLogProbs, Translation
from transduce.decoding.shortlist import Shortlist, load_shortlist
from transduce.errors import DataError, SettingsError, TransduceError
from transduce.text.tokenizer import Tokenizers

MAX_SOURCE = 4096  # tokens; the memory of attention grows with the square
CHUNK_LINES, CHUNK_CHARACTERS = 4096, 1 << 20  # a chunk is sorted and translated at once; only one is in memory
_ALIGNED_AT_ONCE = 64  # pairs

_DEFAULT = DecodingOptions()
_EMPTY = Translation((Candidate("", (), 0.0, 0.0),))


class Translator(EngineModel):
    """A translation model with its vocabularies. Safe to use from several threads.

    >>> translator = Translator.load("runs/x")                       # doctest: +SKIP
    >>> translator.translate(["A dog."])[0].text                     # doctest: +SKIP
    'Ein Hund.'
    >>> translator.translate(["A dog."], DecodingOptions(beam=1)) # doctest: +SKIP
    """

    task = "translation"

    def __init__(
        self,
        engine: Engine,
        tokenizers: Tokenizers,
        *,
        settings: DecodingSettings = _DEFAULT,
        trained_length: int | None = None,
        position_limit: int | None = None,
        choice: EngineChoice = GIVEN,
        shortlist: Callable[[], Shortlist] | None = None,
        guided_head: tuple[int, int] | None = None,
    ) -> None:
        """Wrap an engine: `TorchEngine(model)`, for an encoder-decoder in eval mode.

        Args:
            engine: What decodes.
            tokenizers: The model's vocabularies.
            settings: The values of options that are not given.
            trained_length: Most tokens of a source in training (`data.max_length`). Longer ones get a note.
            position_limit: Number of positions that the model can represent, if they are limited.
            choice: Why it is this engine.
            shortlist: Gives the run's shortlist; called once, if it is needed.
            guided_head: Decoder layer and head that were trained to align, if any.
        """
        super().__init__(engine, choice)
        self.tokenizers, self.settings = tokenizers, settings
        self.trained_length, self.position_limit, self.guided_head = trained_length, position_limit, guided_head
        self._longest_output = (position_limit or MAX_TOKENS) - 1  # as many as can be scored and aligned
        self.longest = min(MAX_SOURCE, self._longest_output)
        """Most tokens of a source, without its end."""
        self._load_shortlist = None if shortlist is None else cache(shortlist)

    @classmethod
    def load(cls, path: str | Path, *, device: str = "auto", precision: AnyPrecision = "float32") -> Translator:
        """Load the model of a run folder.

        On a CPU the native library decodes, where it is built and supports the model; else PyTorch does, and
        `choice.slow_because` has the reason. With the library, PyTorch is imported and given the weights when
        `model` is first asked for.

        Args:
            path: The run folder.
            device: auto, cpu or cuda.
            precision: float32; float32-fast: nearly as exact, with matrix products of pairs of bfloat16 numbers where
                the CPU has AMX; int8: with matrix products of 8-bit integers; bfloat16: the whole model, by PyTorch.
                Without the native library, all but bfloat16 are float32.

        Raises:
            RunFolderError: The folder is missing or damaged.
            SettingsError: The run is of another task, or there is no such device or precision.
        """
        folder, tokenizers, engine, choice = open_engine(path, task=cls.task, device=device, precision=precision)
        return cls(
            engine,
            tokenizers,
            settings=folder.settings.decoding,
            trained_length=folder.settings.data.max_length,
            position_limit=folder.settings.model.position_limit,
            choice=choice,
            shortlist=partial(load_shortlist, folder, tokenizers),
            guided_head=guided_head(folder.settings),
        )

    def shortlist(self) -> Shortlist:
        """The run's shortlist, loaded when it is first asked for. Raises `SettingsError` if there is none."""
        if self._load_shortlist is None:
            raise SettingsError("this model has no run folder, and no shortlist; leave out shortlist = True")
        return self._load_shortlist()

    def translate(
        self,
        texts: Iterable[str],
        options: DecodingOptions = _DEFAULT,
        *,
        prefixes: Iterable[str] | None = None,
    ) -> list[Translation]:
        """Translate each text. Empty texts stay empty. `prefixes`: for each text what its translation starts with.

        The other texts of a call do not change a translation; what is drawn (`options.sample`) is a function of the
        model, the text, its place, the seed and the options. `finished` and `note` say where an output was cut off at
        the length limit. A source that is longer than the model takes is not translated, and one longer than those of
        the training is; both get a note.
        """
        if prefixes is not None:
            texts, prefixes = list(texts), list(prefixes)
            if len(texts) != len(prefixes):
                raise DataError(f"{len(texts)} texts but {len(prefixes)} prefixes; give one each, empty for none")
        return list(self.translate_lines(texts, options, prefixes=prefixes))

    def translate_lines(
        self,
        lines: Iterable[str],
        options: DecodingOptions = _DEFAULT,
        *,
        first: int = 0,
        prefixes: Iterable[str] | None = None,
    ) -> Iterator[Translation]:
        """Translate a stream of any size: read some thousand lines, yield their translations in order, forget them.

        `first`: number of lines before these in the text, which samples depend on. `prefixes`: as for `translate`; as
        many are read as there are lines.
        """
        if isinstance(lines, str):
            raise TypeError("texts must be a list of texts, not one text: translate([text])")
        return self._stream(lines, options.over(self.settings), first, None if prefixes is None else iter(prefixes))

    def score(self, srcs: Sequence[str], tgts: Sequence[str | Sequence[int]]) -> list[TextLogProbs]:
        """Log-probability of each of `tgts` (texts, or token ids) as the translation of each of `srcs`.

        A text is tokenized anew, which may give other tokens than those that a search wrote for it. An empty text for
        an empty source scores 0.
        """
        pairs = self.pairs(srcs, tgts)
        known = [one for one in pairs if one is not None]
        found = iter(self.engine.score(known, batch_tokens=self.settings.batch_tokens))
        return [TextLogProbs(() if one is None else tuple(next(found))) for one in pairs]

    def pairs(self, srcs: Sequence[str], tgts: Sequence[str | Sequence[int]]) -> list[Example | None]:
        """Pairs for the engine to score; None where both texts are empty."""
        if len(srcs) != len(tgts):
            raise DataError(f"{len(srcs)} sources but {len(tgts)} translations to score")
        src_ids = self.tokenizers.src.encode_batch(srcs)
        tgt_ids = [self.tokenizers.tgt.encode(tgt) if isinstance(tgt, str) else list(tgt) for tgt in tgts]
        for number, sides in enumerate(zip(src_ids, tgt_ids, strict=True), 1):
            self.require_length(*sides, where=f"line {number}: ")
        return [Example(src, tgt) if len(src) or tgt else None for src, tgt in zip(src_ids, tgt_ids, strict=True)]

    def align(self, srcs: Sequence[str], tgts: Sequence[str | Translation]) -> list[list[Link]]:
        """The words of each of `tgts` with the words of each of `srcs` that they translate, by character offsets.

        A word of a target has one link or none; a word of a source has any number. It works for every architecture, and
        takes a pass of scoring for each word of a source. Where the run has `guided_head`, it takes one pass; and none
        for what `translate` has returned, if the native library translated it: its search has kept the links.
        """
        heads = None if self.guided_head is None else Heads((self.guided_head,), reads=True)
        return [links for _, links in self.alignments(srcs, tgts, heads)]

    def alignments(
        self,
        srcs: Sequence[str],
        tgts: Sequence[str | Translation],
        heads: Heads | None,
        words: WordRule = words_of_tokens,
    ) -> Iterator[tuple[Alignment, list[Link]]]:
        """Yield each pair of texts with its links. `heads`: see `find_links`; `words`: what a word is.

        Raises:
            DataError: The numbers of texts differ, or a text is longer than the model takes.
        """
        if len(srcs) != len(tgts):
            raise DataError(f"{len(srcs)} sources but {len(tgts)} translations to align")
        for start in range(0, len(srcs), _ALIGNED_AT_ONCE):
            part = slice(start, start + _ALIGNED_AT_ONCE)
            texts = zip(srcs[part], tgts[part], strict=True)
            pairs = [Alignment.read(self.tokenizers, src, tgt, words) for src, tgt in texts]
            for number, one in enumerate(pairs, start + 1):
                self.require_length(one.src.ids, one.tgt.ids, where=f"line {number}: ")
            yield from zip(pairs, find_links(self.engine, pairs, heads), strict=True)

    def _stream(
        self, lines: Iterable[str], options: DecodingOptions, first: int, prefixes: Iterator[str] | None
    ) -> Iterator[Translation]:
        for chunk in chunks(lines, n_lines=min(CHUNK_LINES, self.tokenizers.src.chunk)):
            starts = [""] * len(chunk) if prefixes is None else list(islice(prefixes, len(chunk)))
            if len(starts) < len(chunk):
                raise DataError(f"line {first + len(starts) + 1}: there is no prefix for it; add lines, empty for none")
            yield from self._translate_chunk(chunk, first, options, starts)
            first += len(chunk)

    def _translate_chunk(
        self, lines: Sequence[str], first: int, options: DecodingOptions, starts: Sequence[str]
    ) -> list[Translation]:
        """Translate lines; `first` is the number of the first one in the text. Equal lines are searched for once."""
        found = [_EMPTY] * len(lines)
        sources, places = dict[tuple[Any, ...], DecodingInput](), dict[tuple[Any, ...], list[int]]()
        for place, one in enumerate(self.encode(lines, options, first=first, prefixes=starts)):
            if isinstance(one, Translation):
                found[place] = one
                continue
            key = (np.asarray(one.ids).tobytes(), one.prefix) if not options.sample else (place,)
            sources.setdefault(key, one)
            places.setdefault(key, []).append(place)
        results = self.engine.translate(list(sources.values()), options)
        for (key, source), hypotheses in zip(sources.items(), results, strict=True):
            translation = self.decode(source, hypotheses)
            for place in places[key]:
                found[place] = translation
        return found

    def require_length(self, src_ids: Sized, tgt_ids: Sized, *, where: str = "") -> None:
        """Raise a `DataError` for more tokens than the model takes."""
        for side, ids in (("source", src_ids), ("translation", tgt_ids)):
            if len(ids) > self.longest:
                raise DataError(
                    f"{where}a {side} of {len(ids)} tokens; this model takes at most {self.longest}; split the line "
                    "into sentences"
                )

    def encode(
        self, texts: Sequence[str], options: DecodingOptions, *, first: int = 0, prefixes: Sequence[str] = ()
    ) -> Iterator[DecodingInput | Translation]:
        """The input of the engine for each text; for one that it need not or cannot translate, the translation.

        `options`: all, see `DecodingOptions.over`. `first` and `prefixes`: as for `translate_lines`, if there are any.
        """
        starts = self.tokenizers.tgt.encode_batch(prefixes) if any(prefixes) else [()] * len(texts)
        shortlist = self.shortlist() if options.shortlist else None
        for place, (ids, prefix) in enumerate(zip(self.tokenizers.src.encode_batch(texts), starts, strict=True), first):
            if len(ids) > self.longest:
                note = f"not translated: {len(ids)} tokens; this model takes at most {self.longest}"
                yield replace(_EMPTY, note=note)
            elif not len(ids):
                yield _EMPTY
            else:
                asked = options.most_output(len(ids))
                limit = min(asked, self._longest_output)
                if len(prefix) > limit:
                    raise DataError(
                        f"line {place + 1}: a prefix of {len(prefix)} tokens; its output may have {limit}; "
                        f"shorten the prefix{' or raise max_length' if limit == asked else ''}"
                    )
                allowed = None if shortlist is None else shortlist.tokens(ids, prefix)
                yield DecodingInput((place,), ids, limit, tuple(prefix), allowed)

    def decode(self, source: DecodingInput, hypotheses: Sequence[Hypothesis]) -> Translation:
        """The translation of a source, from what the engine found."""
        if not hypotheses:
            raise TransduceError("the model gives no output a finite probability: its weights are not usable")
        decode = self.tokenizers.tgt.decode
        notes = []
        if self.trained_length is not None and len(source.ids) > self.trained_length:
            notes.append(f"source of {len(source.ids)} tokens; in training data.max_length was {self.trained_length}")
        if not hypotheses[0].finished:
            notes.append(f"output cut off at {source.limit} tokens")
        candidates = (Candidate(decode(h.ids), h.ids, h.log_prob, h.score, h.finished, h.attention) for h in hypotheses)
        return Translation(tuple(candidates), "; ".join(notes))


def chunks(
    lines: Iterable[str], *, n_lines: int = CHUNK_LINES, n_characters: int = CHUNK_CHARACTERS
) -> Iterator[list[str]]:
    """Lists of at most `n_lines` lines; a list also ends with the line that brings it to `n_characters`."""
    chunk: list[str] = []
    size = 0
    for line in lines:
        chunk.append(line)
        size += len(line)
        if len(chunk) == n_lines or size >= n_characters:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
