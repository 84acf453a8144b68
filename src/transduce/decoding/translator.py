"""Text in, translations out: `Translator`."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple, Unpack, overload

import numpy as np

from transduce.config.decoding import DecodingKeywords, DecodingOptions, DecodingSettings
from transduce.config.section import MAX_TOKENS
from transduce.config.settings import DataSettings
from transduce.data.store import Example
from transduce.decoding.alignment import Alignment, Head, Link, WordRule, find_links, guided_head, words_of_tokens
from transduce.decoding.engine import DecodingInput, Engine, Hypothesis, Spelling
from transduce.decoding.open_run import (
    GIVEN,
    AnyPrecision,
    EngineChoice,
    EngineModel,
    RunPaths,
    open_engine,
)
from transduce.decoding.prefix import encode_prefix, prefixes_of, require_beginning, spell_last_word
from transduce.decoding.results import (
    MOST_SHOWN,
    Candidate,
    TextLogProbs,
    Translation,
    distinct,
    lost_numbers,
    notes_on_source,
)
from transduce.errors import DataError, TransduceError, listed
from transduce.text.languages import Languages, is_language
from transduce.text.placeholders import Masked, placeholder_ids, prepare, restore
from transduce.text.sentences import split_sentences
from transduce.text.tokenizer import Tokenizers

MAX_SOURCE = 4096  # most tokens of a source; the memory of attention grows with the square
CHUNK_LINES, CHUNK_CHARACTERS = 4096, 1 << 20  # a chunk is sorted and translated at once; only one chunk is in memory
_ALIGNED_AT_ONCE = 64  # pairs

_DEFAULT, _NO_DATA = DecodingOptions(), DataSettings()
_SPACES = re.compile(r"\s\s")
_EMPTY = Translation((Candidate("", (), 0.0, 0.0),))


class EncodedSource(NamedTuple):
    """An encoded source, and the parts of its text that its translation must contain."""

    input: DecodingInput
    masked: Masked


class Translator(EngineModel):
    """A translation model with its vocabularies. Safe to use from several threads.

    >>> translator = Translator.load("runs/x")                       # doctest: +SKIP
    >>> translator.translate("A dog.").text                          # doctest: +SKIP
    'Ein Hund.'
    >>> translator.translate(["A dog."], beam=5, n_best=3)           # doctest: +SKIP
    """

    task = "translation"

    def __init__(
        self,
        engine: Engine,
        tokenizers: Tokenizers,
        *,
        settings: DecodingSettings = _DEFAULT,
        data: DataSettings | None = None,
        position_limit: int | None = None,
        choice: EngineChoice = GIVEN,
        guided_head: Head | None = None,
    ) -> None:
        """Wrap an engine such as `TorchEngine(model)`, for an encoder-decoder in eval mode.

        `settings`: defaults of decoding options. `data`: the run's data settings: languages, and the longest source in
        tokens; longer sources get a note. `position_limit`: number of positions that the model can represent, if they
        are limited. `guided_head`: decoder layer and head that were trained to align, if any.
        """
        super().__init__(engine, choice)
        self.tokenizers, self.settings = tokenizers, settings
        self.data, self.position_limit, self.guided_head = data, position_limit, guided_head
        named = data or _NO_DATA
        self.languages = named.src_lang, named.tgt_lang
        self._longest_output = (position_limit or MAX_TOKENS) - 1  # most tokens that can be scored and aligned
        self.longest = min(MAX_SOURCE, self._longest_output)
        """Maximum number of tokens of a source, without its end."""

    @classmethod
    def load(
        cls,
        path: RunPaths,
        *,
        device: str = "auto",
        precision: AnyPrecision = "float32",
        trainable: bool = False,
    ) -> Translator:
        """Load the model of a run folder, or the models of an ensemble.

        On a CPU, the native library decodes if it is built and supports the model. Otherwise PyTorch decodes, and
        `choice.slow_because` has the reason. With the library, PyTorch loads the weights only when `model` is first
        used.

        Args:
            path: The run folder, or OWNER/NAME of one on the Hugging Face Hub. Several are an ensemble: the probability
                of a token is the mean of the models' probabilities (see `Ensemble`), computed by PyTorch. They need the
                same vocabularies. The first run determines the decoding settings and the head that aligns words.
            device: auto, cpu or cuda.
            precision: float32; float32-fast: nearly as exact; if the CPU has AMX, each product of numbers is computed
                as three of bfloat16 numbers; int8: with matrix products of 8-bit integers; bfloat16: the whole model,
                by PyTorch. Without the native library, float32-fast and int8 are float32.
            trainable: PyTorch decodes, and the parameters of `model` get gradients. The model is in eval mode, which
                translation needs.

        Raises:
            RunFolderError: A folder is missing or damaged.
            SettingsError: The run is of another task, there is no such device or precision, or a run of the ensemble
                has other vocabularies or languages.
        """
        folders, tokenizers, engine, choice = open_engine(
            path, task=cls.task, device=device, precision=precision, trainable=trainable
        )
        settings, limits = folders[0].settings, [folder.settings.model.position_limit for folder in folders]
        return cls(
            engine,
            tokenizers,
            settings=settings.decoding,
            data=settings.data,
            position_limit=min((limit for limit in limits if limit), default=None),
            choice=choice,
            guided_head=guided_head(settings),
        )

    def between(self, src_lang: str | None = None, tgt_lang: str | None = None) -> Translator:
        """Return a translator for other languages of the model, which shares its engine.

        Args:
            src_lang: Language of the sources, such as fr, fra, fr-CA or fra_Latn (default: this translator's).
            tgt_lang: Language of the translations, likewise.

        Raises:
            SettingsError: The model lacks a language, or has several and none is chosen.
        """
        own, given = self._named_languages, (src_lang, tgt_lang)
        other, chosen = copy.copy(self), self.tokenizers.src.framing.choose(own, given)
        other.tokenizers = self.tokenizers.between(*chosen)
        other.languages = chosen[0] or self.languages[0], chosen[1] or self.languages[1]
        return other

    def direction_notes(self) -> list[str]:
        """List a note if no training text had these languages in this direction."""
        framing = self.tokenizers.src.framing
        src, tgt = self._named_languages
        if not framing.is_zero_shot(src, tgt):
            return []
        known = ", ".join("-".join(pair) for pair in framing.directions)
        return [f"zero-shot: the model was not trained from {src} to {tgt}, only {known}"]

    @property
    def _named_languages(self) -> Languages:
        """The languages of source and target; None for an unknown language."""
        return DataSettings(src_lang=self.languages[0], tgt_lang=self.languages[1]).named_languages

    @overload
    def translate(  # type: ignore[overload-overlap]  # a text is no list of texts, although it has characters
        self,
        texts: str,
        options: DecodingOptions = _DEFAULT,
        *,
        prefixes: Iterable[str] | None = None,
        **decoding: Unpack[DecodingKeywords],
    ) -> Translation: ...

    @overload
    def translate(
        self,
        texts: Iterable[str],
        options: DecodingOptions = _DEFAULT,
        *,
        prefixes: Iterable[str] | None = None,
        **decoding: Unpack[DecodingKeywords],
    ) -> list[Translation]: ...

    def translate(
        self,
        texts: str | Iterable[str],
        options: DecodingOptions = _DEFAULT,
        *,
        prefixes: Iterable[str] | None = None,
        **decoding: Unpack[DecodingKeywords],
    ) -> Translation | list[Translation]:
        """Translate one text, or each text of a list. Empty texts stay empty.

        Each sentence of a text is translated separately, and line breaks and list markers are kept, unless `split` is
        false. A translation does not depend on the other texts of a call. A sample (`sample=True`) is a function of the
        model, the text, its position, the seed and the options. If an output is cut off at the length limit, `finished`
        is false and `note` says so. A source that is too long for the model is not translated, and gets a note, as does
        a source that is longer than all sources in training.

        Args:
            texts: The sources.
            options: Decoding options as an object.
            prefixes: The beginning of each translation; empty for none.
            decoding: Decoding options as keywords, such as `beam=5`, which replace those of `options`. See
                `DecodingOptions`.

        Raises:
            SettingsError: An option is unknown, out of bounds, or contradicts another one.
            DataError: The numbers of texts and prefixes differ.
        """
        options = options.with_values(**decoding)
        if isinstance(texts, str):
            return self.translate([texts], options, prefixes=prefixes)[0]
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
        **decoding: Unpack[DecodingKeywords],
    ) -> Iterator[Translation]:
        """Translate a stream of any size in chunks of some thousand lines; yield the translations in order.

        `first`: line number of the first line, from 0, which determines random samples. `prefixes`, `decoding`: see
        `translate`; one prefix is read for each line.
        """
        if isinstance(lines, str):
            raise TypeError("lines must be a list of texts, not one text: translate(text) takes one")
        options = options.with_values(**decoding)
        return self._stream(lines, options.over(self.settings), first, None if prefixes is None else iter(prefixes))

    def score(self, srcs: Sequence[str], tgts: Sequence[str | Sequence[int]]) -> list[TextLogProbs]:
        """Log-probability of each target (text or token ids) as the translation of the source at the same index.

        A text is tokenized anew, so its tokens may differ from the tokens that a search wrote. An empty text for an
        empty source scores 0.
        """
        pairs = self.pairs(srcs, tgts)
        known = [pair for pair in pairs if pair is not None]
        log_probs = self.engine.score(known, batch_tokens=self.settings.batch_tokens)
        return self.text_log_probs(pairs, log_probs)

    def text_log_probs(
        self, pairs: Iterable[Example | None], log_probs: Iterable[Sequence[float]]
    ) -> list[TextLogProbs]:
        """Return each target's log-probabilities without its language tokens, which are part of the input.

        `log_probs`: the engine's results for the pairs that are not None.
        """
        rows, n_frame = iter(log_probs), self.tokenizers.tgt.n_frame
        return [TextLogProbs(() if pair is None else tuple(next(rows))[n_frame(pair.tgt) :]) for pair in pairs]

    def pairs(self, srcs: Sequence[str], tgts: Sequence[str | Sequence[int]]) -> list[Example | None]:
        """Encode pairs for the engine to score; None for a pair of empty texts."""
        _require_pairs(srcs, tgts, "score")
        src_vocabulary, pairs = self.tokenizers.src, list[Example | None]()
        encoded = zip(srcs, tgts, src_vocabulary.encode_batch(srcs), strict=True)
        for number, (src, tgt, src_ids) in enumerate(encoded, 1):
            if isinstance(tgt, str):
                masked, masked_tgt = self.tokenizers.masked(src, tgt, src_ids)
                tgt_ids = self.tokenizers.tgt.encode(masked_tgt.text)
            else:
                masked, tgt_ids = prepare(src, src_vocabulary, src_ids), list(tgt)
            if masked.text != src:
                src_ids = src_vocabulary.encode(masked.text)
            if len(src_ids) and tgt == "":
                tgt_ids = list(self.tokenizers.tgt.frame or ())  # like a search that ends at once
            self.require_length(src_ids, tgt_ids, where=f"line {number}: ")
            pairs.append(Example(src_ids, tgt_ids) if len(src_ids) or tgt_ids else None)
        return pairs

    def align(self, srcs: Sequence[str], tgts: Sequence[str | Translation]) -> list[list[Link]]:
        """Link the words of each target to the source words that they translate, by character offsets.

        A word of a target has one link or none; a word of a source has any number. Every architecture is supported.
        Alignment takes a scoring pass for each word of a source. If the run has a `guided_head`, it takes one pass, or
        none for a result of `translate` by the native library, whose search keeps the links.
        """
        _require_pairs(srcs, tgts, "align")
        lines = [
            tgt.sentences if isinstance(tgt, Translation) and tgt.sentences else [(src, tgt, 0, 0)]
            for src, tgt in zip(srcs, tgts, strict=True)
        ]
        sentences = [sentence for line in lines for sentence in line]
        aligned = self.alignments([src for src, *_ in sentences], [tgt for _, tgt, *_ in sentences], self.guided_head)
        links = (
            [Link(a + src_start, b + src_start, c + tgt_start, d + tgt_start) for a, b, c, d in links]
            for (_, _, src_start, tgt_start), (_, links) in zip(sentences, aligned, strict=True)
        )
        return [[link for _ in line for link in next(links)] for line in lines]

    def alignments(
        self,
        srcs: Sequence[str],
        tgts: Sequence[str | Translation],
        head: Head | None,
        words: WordRule = words_of_tokens,
    ) -> Iterator[tuple[Alignment, list[Link]]]:
        """Yield each pair of texts with its links. `head`: see `find_links`; `words`: splits a text into words.

        Raises:
            DataError: The numbers of texts differ, or a text is longer than the model takes.
        """
        _require_pairs(srcs, tgts, "align")
        for start in range(0, len(srcs), _ALIGNED_AT_ONCE):
            part = slice(start, start + _ALIGNED_AT_ONCE)
            texts = zip(srcs[part], tgts[part], strict=True)
            pairs = [Alignment.read(self.tokenizers, src, tgt, words) for src, tgt in texts]
            for number, pair in enumerate(pairs, start + 1):
                self.require_length(pair.src.ids, pair.tgt.ids, where=f"line {number}: ")
            yield from zip(pairs, find_links(self.engine, pairs, head), strict=True)

    def _stream(
        self, lines: Iterable[str], options: DecodingOptions, first: int, prefixes: Iterator[str] | None
    ) -> Iterator[Translation]:
        for chunk in chunks(lines, n_lines=min(CHUNK_LINES, self.tokenizers.src.chunk)):
            starts = [""] * len(chunk) if prefixes is None else list(islice(prefixes, len(chunk)))
            if len(starts) < len(chunk):
                raise DataError(f"line {first + len(starts) + 1}: there is no prefix for it; add lines, empty for none")
            lines_in_parts = [self.split(line, options) for line in chunk]
            sentences, keys = list[str](), list[tuple[int, ...]]()
            for number, parts in enumerate(lines_in_parts, first):
                sentences += parts[::2]
                keys += [(number, i) if i else (number,) for i in range(len(parts[::2]))]
            starts = list(chain.from_iterable(map(prefixes_of, lines_in_parts, starts)))
            translated = iter(self._translate_chunk(sentences, keys, options, starts))
            for parts in lines_in_parts:
                own = list(islice(translated, len(parts[::2])))
                yield own[0] if len(parts) == 1 else Translation.join(parts, own)
            first += len(chunk)

    def split(self, text: str, options: DecodingOptions, language: str | None = None) -> list[str]:
        """Split a text into sentences and separators; see `split_sentences`. A text of one sentence stays whole.

        `language`: language of the text (default: the source language of the run).
        """
        if not self.tokenizers.src.reads_text:
            return [text]
        is_split = self.settings.split if options.split is None else options.split
        parts = split_sentences(text, None if is_split is False else language or self.languages[0])
        return parts if sum(map(bool, parts[::2])) > 1 or any(map(str.strip, parts[1::2])) else [text]

    def _translate_chunk(
        self, lines: Sequence[str], keys: Sequence[tuple[int, ...]], options: DecodingOptions, starts: Sequence[str]
    ) -> list[Translation]:
        """Translate sentences, equal ones only once, except in sampling. `keys`: see `encode`."""

        def search_key(source: DecodingInput) -> tuple[Any, ...]:
            ids = np.asarray(source.ids).tobytes()
            return source.key if options.sample else (ids, source.prefix, source.spelling)

        encoded = list(self.encode(lines, options, keys=keys, prefixes=starts))
        sources = dict[tuple[Any, ...], DecodingInput]()
        for line in encoded:
            if isinstance(line, EncodedSource):
                sources.setdefault(search_key(line.input), line.input)
        hypotheses = dict(zip(sources, self.engine.translate([*sources.values()], options), strict=True))
        return [
            self.decode(line, hypotheses[search_key(line.input)], options) if isinstance(line, EncodedSource) else line
            for line in encoded
        ]

    def require_length(self, src_ids: Sized, tgt_ids: Sized, *, where: str = "") -> None:
        """Raise a `DataError` if a text exceeds the model's length limit."""
        for side, ids in (("source", src_ids), ("translation", tgt_ids)):
            if len(ids) > self.longest:
                raise DataError(
                    f"{where}a {side} of {len(ids)} tokens; this model takes at most {self.longest}; split the line "
                    "into sentences"
                )

    def encode(
        self,
        texts: Sequence[str],
        options: DecodingOptions,
        *,
        keys: Sequence[tuple[int, ...]] = (),
        prefixes: Sequence[str] = (),
    ) -> Iterator[EncodedSource | Translation]:
        """Yield the engine's input for each text, or the final `Translation` if the text is not decoded or too long.

        `options`: complete options, see `DecodingOptions.over`. `keys`: keys of the inputs; each begins with a line
        number (default: a text is a line). `prefixes`: as for `translate_lines`, if there are any.
        """
        src, ids_of = self.tokenizers.src, self.tokenizers.src.encode_batch(texts)
        keys = keys or [(number,) for number in range(len(texts))]
        is_language_pair = src.reads_text and all(is_language(code or "") for code in self.languages)
        for text, key, ids, start in zip(texts, keys, ids_of, prefixes or [""] * len(texts), strict=True):
            # Between languages, text without letters, such as 1,234, is kept; other tasks may be about digits.
            has_words = bool(start) or not is_language_pair or any(map(str.isalpha, text))
            masked = prepare(text, src, ids) if has_words else Masked("", before=text)
            if start and masked.text and not start.startswith(masked.before):
                masked = prepare(text, src, ids, whole=True)  # the output begins with the prefix
            if masked.text != text:
                ids = src.encode(masked.text)
            if len(ids) > self.longest:
                note = f"not translated: {len(ids)} tokens; this model takes at most {self.longest}"
                yield replace(_EMPTY, note=note)
            elif not len(ids):
                require_beginning(masked.before, start, f"line {key[0] + 1}: ")
                note = "; ".join(notes_on_source(masked, src))
                yield Translation((replace(_EMPTY.candidates[0], text=masked.before),), note)
            else:
                asked = options.most_output(len(ids))
                limit = min(asked, self._longest_output)
                frame = self.tokenizers.tgt.frame or ()
                prefix, spelling = list(frame), Spelling()
                if start:
                    prefix, masked = encode_prefix(start, self.tokenizers.tgt, masked, f"line {key[0] + 1}: ")
                if len(prefix) > limit:
                    raise DataError(
                        f"line {key[0] + 1}: a prefix of {len(prefix)} tokens; its output may have {limit}; "
                        f"shorten the prefix{' or raise max_length' if limit == asked else ''}"
                    )
                prefix = prefix or list(frame)
                if len(prefix) > len(frame):
                    prefix, spelling = spell_last_word(
                        prefix, start, self.tokenizers.tgt, limit=limit, may_end=not masked.parts
                    )
                copies = placeholder_ids(masked.text) if self.tokenizers.tgt.has_placeholders else None
                yield EncodedSource(DecodingInput(key, ids, limit, tuple(prefix), copies, spelling, len(frame)), masked)

    def decode(self, encoded: EncodedSource, hypotheses: Sequence[Hypothesis], options: DecodingOptions) -> Translation:
        """Make a `Translation` from the engine's hypotheses. A search's hypotheses with equal texts are merged."""
        if not hypotheses:
            raise TransduceError("the model gives no output a finite probability: its weights are not usable")
        source, masked = encoded
        notes = notes_on_source(masked, self.tokenizers.src)
        if _SPACES.search(masked.text) and not self.tokenizers.src.keeps_spaces:
            notes.append("runs of spaces became single ones")
        if self.data is not None and len(source.ids) > self.data.max_length:
            notes.append(f"source of {len(source.ids)} tokens; in training data.max_length was {self.data.max_length}")
        if not hypotheses[0].finished:
            notes.append(f"output cut off at {source.limit} tokens")
        candidates = [
            Candidate(
                restore(self.tokenizers.tgt.decode(h.ids), masked), h.ids, h.log_prob, h.score, h.finished, h.attention
            )
            for h in hypotheses
        ]
        if not candidates[0].text.strip():
            notes.append("the translation is empty")
        elif numbers := lost_numbers(masked.text, candidates[0].text):
            notes.append(f"numbers that the translation lacks: {listed(numbers, MOST_SHOWN)}")
        return Translation(tuple(candidates if options.sample else distinct(candidates)), "; ".join(notes))


def _require_pairs(srcs: Sized, tgts: Sized, use: str) -> None:
    if len(srcs) != len(tgts):
        raise DataError(f"{len(srcs)} sources but {len(tgts)} translations to {use}")


def chunks(
    lines: Iterable[str], *, n_lines: int = CHUNK_LINES, n_characters: int = CHUNK_CHARACTERS
) -> Iterator[list[str]]:
    """Yield lists of at most `n_lines` lines; a list also ends when it reaches `n_characters`."""
    chunk: list[str] = []
    size = 0
    for line in lines:
        if not isinstance(line, str):  # bytes are refused: they would be encoded as wrong text
            raise TypeError(f"texts must be of type str, not {type(line).__name__}: {line!r:.100}")
        chunk.append(line)
        size += len(line)
        if len(chunk) == n_lines or size >= n_characters:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
