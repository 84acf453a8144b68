"""Translate from asyncio: the sentences of all callers share one queue."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from transduce.config.decoding import DecodingOptions
from transduce.data.examples import Example
from transduce.decoding.alignment import Alignment, Link
from transduce.decoding.engine import DecodingInput
from transduce.decoding.queue import DecodingQueue
from transduce.decoding.results import TextLogProbs, Translation
from transduce.decoding.translator import Translator
from transduce.errors import DataError
from transduce.process import n_threads_to_use
from transduce.serving.concurrency import expiring, offload, remaining
from transduce.serving.limits import Admission

_DEFAULT = DecodingOptions()
_PIECE = 2048  # tokens that are scored together: fast, and soon done when the client has left

ResultT = TypeVar("ResultT")


class AsyncTranslator:
    """A translator for one event loop.

    Attributes:
        queue: Decodes for all callers.
        n_new: Tokens of all results so far.
    """

    def __init__(self, translator: Translator, admission: Admission) -> None:
        """Open the queue; call this inside a running event loop. `admission`: refuses work when too much is waiting."""
        self.translator, self._admission = translator, admission
        self.queue, self.n_new = DecodingQueue(translator.engine), 0
        self._threads = ThreadPoolExecutor(n_threads_to_use(), thread_name_prefix="score")

    async def translate(
        self,
        texts: Sequence[str],
        options: DecodingOptions = _DEFAULT,
        *,
        end: float = math.inf,
        prefixes: Sequence[str] = (),
        refuse: bool = True,
        on_part: Callable[[str], object] | None = None,
    ) -> list[Translation]:
        """Translate sentences; the results are those of `Translator.translate`, bit for bit.

        Args:
            texts: The sentences.
            options: How to decode.
            end: Time of the event loop at which the work is given up.
            prefixes: What the translation of each starts with, if there are any.
            refuse: See `Admission.tokens`.
            on_part: Sees the beginning of the translation of a single sentence as it grows: with beams, what all live
                hypotheses share.

        Raises:
            DataError: A sentence is longer than the model takes.
            ExpiredError: `end` has passed.
            OverloadedError: Too much is waiting.
        """
        options = options.over(self.translator.settings)
        encoded = await offload(len(texts), self._encode, texts, options, prefixes)
        sources = [one for one in encoded if isinstance(one, DecodingInput)]
        known: list[int] = []

        def on_tokens(place: int, tokens: tuple[int, ...]) -> bool:
            known.extend(tokens)
            if on_part is not None:
                on_part(self.translator.tokenizers.tgt.decode(known))
            return False

        watch = None if on_part is None else on_tokens
        n_tokens = options.beam * sum(len(source.ids) + source.limit for source in sources)
        with self._admission.tokens(n_tokens, refuse=refuse):
            found = iter(await self.queue.decode(sources, options, seconds=remaining(end), on_tokens=watch))

        def decoded() -> list[Translation]:
            return [
                self.translator.decode(one, next(found)) if isinstance(one, DecodingInput) else one for one in encoded
            ]

        translations = await offload(len(texts) * options.n_best, decoded)
        self.n_new += sum(len(one.ids) for one in translations)
        return translations

    async def warm_up(self) -> None:
        """Translate something: the first time takes longer. Never refused."""
        await self.translate(["1 2 3"], refuse=False)

    async def align(
        self, srcs: Sequence[str], tgts: Sequence[str | Translation], *, end: float = math.inf
    ) -> list[list[Link]]:
        """Align sentences, one after another: see `Translator.align`. Empty ones have no links.

        Raises `ExpiredError`: they are not done at `end`, a time of the event loop.
        """
        found: list[list[Link]] = []
        async with expiring(end):
            for src, tgt in zip(srcs, tgts, strict=True):
                text = tgt if isinstance(tgt, str) else tgt.text
                if not text.strip():
                    found.append([])
                    continue
                if self.translator.guided_head is not None:  # a single pass or none
                    found += await self._in_thread(self.translator.align, [src], [tgt])
                    continue
                one, pairs = await self._in_thread(self._read, src, text)
                found.append(one.links(await self._score(pairs)))
        return found

    def _read(self, src: str, tgt: str) -> tuple[Alignment, list[Example]]:
        one = Alignment.read(self.translator.tokenizers, src, tgt)
        self.translator.require_length(one.src.ids, one.tgt.ids)
        return one, one.pairs()

    async def score(
        self, srcs: Sequence[str], tgts: Sequence[Sequence[int]], *, end: float = math.inf
    ) -> list[TextLogProbs]:
        """Score translations, as token ids: see `Translator.score`. Empty ones have no tokens.

        Raises `ExpiredError`: they are not done at `end`, a time of the event loop.
        """
        srcs = [src if len(tgt) else "" for src, tgt in zip(srcs, tgts, strict=True)]
        async with expiring(end):
            pairs = await self._in_thread(self.translator.pairs, srcs, tgts)
            found = iter(await self._score([one for one in pairs if one is not None]))
        return [TextLogProbs(() if one is None else tuple(next(found))) for one in pairs]

    async def _score(self, pairs: Sequence[Example]) -> list[list[float]]:
        """Score pairs as `Engine.score` does, a few at a time, so that other requests proceed and the work stops soon.

        Only the pairs that are being scored, or are next, count as work: others do not wait for the rest.
        """
        found: list[list[float]] = []
        for piece, n_tokens in _pieces(pairs):
            with self._admission.tokens(n_tokens, refuse=False):
                found += await self._in_thread(self.translator.engine.score, piece)
        return found

    async def _in_thread(self, work: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Call `work` in one of the threads for scoring: as many as decode, so that both kinds of work proceed."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *arguments))

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self.queue.close()

    def _encode(
        self, texts: Sequence[str], options: DecodingOptions, prefixes: Sequence[str]
    ) -> list[DecodingInput | Translation]:
        encoded = list(self.translator.encode(texts, options, prefixes=prefixes))
        for text, one in zip(texts, encoded, strict=True):
            if isinstance(one, Translation) and one.note:  # clients of most protocols would not see the note
                raise DataError(f"{text[:40]!r}: {one.note}; cut it into shorter sentences")
        return encoded


def _pieces(pairs: Sequence[Example]) -> Iterator[tuple[list[Example], int]]:
    """Split pairs into pieces of about `_PIECE` tokens; yields each with its number of tokens."""
    piece, n_tokens = list[Example](), 0
    for pair in pairs:
        piece.append(pair)
        n_tokens += len(pair.src) + len(pair.tgt)
        if n_tokens >= _PIECE:
            yield piece, n_tokens
            piece, n_tokens = [], 0
    if piece:
        yield piece, n_tokens
