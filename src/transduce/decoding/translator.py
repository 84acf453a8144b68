"""Text in, text out: `Translator`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transduce.config import DecodingSettings
from transduce.data.batch import collate, pad_sources
from transduce.data.objectives import Example
from transduce.decoding.batches import Sentence, chunks, cut, once
from transduce.decoding.loading import Precision, open_model
from transduce.decoding.results import Candidate, Score, Translation
from transduce.decoding.sample import Sampling, sample
from transduce.decoding.score import token_log_probs
from transduce.decoding.search import Hypothesis, beam_search
from transduce.decoding.workers import workers
from transduce.errors import DataError, SettingsError, TransduceError
from transduce.text.tokenizer import Tokenizers

LONGEST_SOURCE = 4096  # tokens; attention's memory grows with the square
MOST_ROWS = 320  # hypotheses of a batch: enough for wide products, few enough for a CPU's caches


@dataclass(frozen=True, slots=True)
class _Search:
    """What is done with a batch, and how many hypotheses a sentence has in it."""

    of: Callable[[Sequence[Sentence]], list[list[Hypothesis]]]
    width: int
    alike: bool = False  # the same sentence gives the same, wherever it stands: it is searched for once a chunk


_EMPTY = Translation((Candidate("", (), 0.0, 0.0),))


class Translator:
    """A model with its vocabularies. Safe to use from several threads: nothing in it changes.

    `Translator.load("runs/x").translate(["A dog."])[0].text` is "Ein Hund.", after some training.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizers: Tokenizers,
        settings: DecodingSettings | None = None,
        *,
        trained_length: int | None = None,
        longest: int = LONGEST_SOURCE,
    ) -> None:
        """`trained_length`: the longest source in tokens that training saw; `longest`: that the model can take."""
        self.model: Any = model  # of any kind that the MODELS table knows
        self.tokenizers = tokenizers
        self.settings = settings or DecodingSettings()
        self.trained_length, self.longest = trained_length, longest

    @classmethod
    def load(cls, path: str | Path, *, device: str = "auto", precision: Precision = "float32") -> Translator:
        """The translator in a run folder. Raises `RunFolderError` (missing or damaged), `SettingsError` (device)."""
        folder, model, tokenizers = open_model(path, task="translation", device=device, precision=precision)
        settings = folder.settings
        learned = settings.model.positions == "learned"
        longest = min(LONGEST_SOURCE, settings.model.max_positions - 1) if learned else LONGEST_SOURCE
        return cls(model, tokenizers, settings.decoding, trained_length=settings.data.max_length, longest=longest)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def translate(
        self,
        texts: Iterable[str],
        *,
        beam: int | None = None,
        n_best: int = 1,
        max_length: int | None = None,
        length_penalty: float | None = None,
        batch_tokens: int | None = None,
    ) -> list[Translation]:
        """The translation of each text. Empty ones stay empty.

        What is None comes from the run's settings. An output has at most `max_length` tokens; with None at most the
        settings' `max_length` and twice its source and 16 more. One that is cut off there says so (`finished`, `note`).
        What shares a sentence's batch does not change its translation. A source that is longer than the model can take
        stays empty, with a note; one that is longer than training saw is translated, with a note.
        """
        search = self._searching(beam=beam, n_best=n_best, length_penalty=length_penalty)
        return list(self._run(texts, search, max_length=max_length, batch_tokens=batch_tokens))

    def translate_lines(
        self,
        lines: Iterable[str],
        *,
        beam: int | None = None,
        n_best: int = 1,
        max_length: int | None = None,
        length_penalty: float | None = None,
        batch_tokens: int | None = None,
    ) -> Iterator[Translation]:
        """`translate` for text of any size: reads some thousand lines at a time, yields in order, keeps nothing."""
        search = self._searching(beam=beam, n_best=n_best, length_penalty=length_penalty)
        return self._run(lines, search, max_length=max_length, batch_tokens=batch_tokens)

    def sample(
        self,
        texts: Iterable[str],
        *,
        sampling: Sampling | None = None,
        seed: int = 1,
        n_best: int = 1,
        max_length: int | None = None,
        batch_tokens: int | None = None,
    ) -> Iterator[Translation]:
        """`n_best` random translations of each text, streaming as `translate_lines` does.

        They are a function of the model, the text, its place, the seed and `sampling`: not of batches.
        """
        sampling = sampling or Sampling()

        def draw(batch: Sequence[Sentence]) -> list[list[Hypothesis]]:
            return sample(
                self.model,
                self._sources(batch),
                max_length=[sentence.limit for sentence in batch],
                seeds=[(seed, sentence.number) for sentence in batch],
                sampling=sampling,
                n_samples=n_best,
            )

        return self._run(texts, _Search(draw, n_best), max_length=max_length, batch_tokens=batch_tokens)

    def score(
        self, srcs: Sequence[str], tgts: Sequence[str | Sequence[int]], *, batch_tokens: int | None = None
    ) -> list[Score]:
        """How likely the model finds each of `tgts` (texts, or token ids) as the translation of each of `srcs`.

        A text is cut into tokens anew, which need not be those that a search wrote for it. An empty text for an empty
        source costs nothing.
        """
        if len(srcs) != len(tgts):
            raise DataError(f"{len(srcs)} sources but {len(tgts)} translations to score")
        src_ids = self.tokenizers.src.encode_batch(srcs)
        tgt_ids = [self.tokenizers.tgt.encode(tgt) if isinstance(tgt, str) else list(tgt) for tgt in tgts]
        for side, ids in (("source", src_ids), ("translation", tgt_ids)):
            for number, sentence in enumerate(ids):
                self._check_length(sentence, number, side)
        pairs = [
            Sentence(number, src, len(tgt))
            for number, (src, tgt) in enumerate(zip(src_ids, tgt_ids, strict=True))
            if src or tgt
        ]
        scores = [Score(()) for _ in srcs]
        budget = batch_tokens or self.settings.batch_tokens
        for batch in cut(pairs, budget=budget, most=budget, width=lambda pair: max(len(pair.ids), pair.limit) + 1):
            tensors = collate([Example(pair.ids, tgt_ids[pair.number]) for pair in batch]).to(self.device)
            known = token_log_probs(self.model, tensors.inputs, tensors.targets).tolist()
            for pair, row in zip(batch, known, strict=True):
                scores[pair.number] = Score(tuple(row[: pair.limit + 1]))
        return scores

    def _searching(self, *, beam: int | None, n_best: int, length_penalty: float | None) -> _Search:
        """Beam search as asked for, and by the settings where nothing is asked."""
        beam = max(self.settings.beam, n_best) if beam is None else beam
        if beam < 1 or n_best < 1:
            raise SettingsError(f"beam = {beam}, n_best = {n_best}: both must be at least 1")
        if n_best > beam:
            raise SettingsError(f"n_best = {n_best}: a beam of {beam} holds fewer; use beam = {n_best} or more")
        penalty = self.settings.length_penalty if length_penalty is None else length_penalty
        if not 0 <= penalty < math.inf:
            raise SettingsError(f"length_penalty = {penalty}: must be a number from 0 on")

        def search(batch: Sequence[Sentence]) -> list[list[Hypothesis]]:
            limits = [sentence.limit for sentence in batch]
            return beam_search(
                self.model, self._sources(batch), max_length=limits, beam=beam, n_best=n_best, length_penalty=penalty
            )

        return _Search(search, beam, alike=True)

    def _sources(self, batch: Sequence[Sentence]) -> Tensor:
        return pad_sources([sentence.ids for sentence in batch]).to(self.device)

    def _run(
        self, lines: Iterable[str], search: _Search, *, max_length: int | None, batch_tokens: int | None
    ) -> Iterator[Translation]:
        """Chunk by chunk: tokens, batches, search, text, the lines' order."""
        assert not self.model.training, "a model translates in eval mode"
        if isinstance(lines, str):
            raise TypeError("texts must be a list of texts, not one text: translate([text])")
        first, most = 0, max(1, MOST_ROWS // search.width)
        with workers(self.device) as crew:
            for chunk in chunks(lines):
                found = [_EMPTY] * len(chunk)
                sentences = []
                for sentence in self._sentences(chunk, first, max_length):
                    if len(sentence.ids) <= self.longest:
                        sentences.append(sentence)
                        continue
                    note = f"not translated: its {len(sentence.ids)} tokens are more than the {self.longest} that fit"
                    found[sentence.number - first] = replace(_EMPTY, note=note)
                others: dict[int, list[int]] = {}
                if search.alike:
                    sentences, others = once(sentences)
                budget = batch_tokens or self.settings.batch_tokens
                batches = cut(sentences, budget=budget, most=most, width=lambda sentence: len(sentence.ids) + 1)
                for batch, results in zip(batches, crew.map(search.of, batches), strict=True):
                    for sentence, hypotheses in zip(batch, results, strict=True):
                        translation = self._translation(sentence, hypotheses)
                        for number in (sentence.number, *others.get(sentence.number, ())):
                            found[number - first] = translation
                yield from found
                first += len(chunk)

    def _sentences(self, lines: Sequence[str], first: int, max_length: int | None) -> list[Sentence]:
        """The lines that hold something, as tokens."""
        sentences = []
        for number, ids in enumerate(self.tokenizers.src.encode_batch(lines), start=first):
            limit = max_length or min(self.settings.max_length, 2 * len(ids) + 16)
            if ids:
                sentences.append(Sentence(number, ids, limit))
        return sentences

    def _check_length(self, ids: Sequence[int], number: int, side: str) -> None:
        if len(ids) > self.longest:
            raise DataError(
                f"line {number + 1}: a {side} of {len(ids)} tokens; this model takes at most {self.longest}; "
                "cut the line into sentences"
            )

    def _translation(self, sentence: Sentence, hypotheses: Sequence[Hypothesis]) -> Translation:
        if not hypotheses:
            raise TransduceError("the model gives no finite probability to any output: its weights are of no use")
        decode = self.tokenizers.tgt.decode
        notes = []
        if self.trained_length is not None and len(sentence.ids) > self.trained_length:
            notes.append(f"source of {len(sentence.ids)} tokens; training saw at most {self.trained_length}")
        if not hypotheses[0].finished:
            notes.append(f"output cut off at {sentence.limit} tokens")
        candidates = (Candidate(decode(h.ids), h.ids, h.log_prob, h.score, h.finished) for h in hypotheses)
        return Translation(tuple(candidates), "; ".join(notes))
