"""Translate from asyncio: the sentences of all callers share one queue."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

from transduce.decoding.alignment import Link, n_scored_tokens
from transduce.decoding.engine import Hypothesis, Source
from transduce.decoding.options import TranslationOptions
from transduce.decoding.results import Score, Translation
from transduce.decoding.translator import Translator
from transduce.serving.async_model import EXPIRED, AsyncModel, in_parts
from transduce.serving.limits import Admission, ExpiredError

_DEFAULT = TranslationOptions()
_SCORED = 16  # sentences that are scored together: fast, and soon done when the client has left

ResultT = TypeVar("ResultT")
TargetT = TypeVar("TargetT")


class AsyncTranslator(AsyncModel):
    """A translator for one event loop: see `AsyncModel`.

    >>> translator = AsyncTranslator(Translator.load("runs/x"))      # doctest: +SKIP
    >>> await translator.translate(["A dog."])                       # doctest: +SKIP
    """

    def __init__(self, translator: Translator, *, admission: Admission | None = None) -> None:
        """Start the translator's queue: see `AsyncModel`."""
        super().__init__(translator.engine, admission=admission)
        self.translator = translator

    async def translate(
        self,
        texts: Sequence[str],
        options: TranslationOptions = _DEFAULT,
        *,
        seconds: float = math.inf,
        prefixes: Sequence[str] = (),
        refuse: bool = True,
    ) -> list[Translation]:
        """Translate sentences; the results are those of `Translator.translate`, bit for bit.

        `refuse`: see `Admission.tokens`.

        Raises:
            ExpiredError: `seconds` have passed.
            OverloadedError: Too much is waiting.
        """
        encoded = list(self.translator.encode(texts, options, prefixes=prefixes))
        sources = [one for one in encoded if isinstance(one, Source)]
        with self._admitted(self._cost(sources, options), refuse=refuse):
            found = iter(await self._decode(sources, options, seconds=seconds))
        return [self._translation(one, next(found)) if isinstance(one, Source) else one for one in encoded]

    async def warm_up(self) -> None:
        """Translate something: the first time takes longer. Never refused."""
        sources = [one for one in self.translator.encode(["1 2 3"], _DEFAULT) if isinstance(one, Source)]
        await self._decode(sources, _DEFAULT)

    async def align(self, srcs: Sequence[str], tgts: Sequence[str], *, end: float = math.inf) -> list[list[Link]]:
        """Align sentences in another thread, one after another: see `Translator.align`. Empty ones have no links.

        Raises `ExpiredError`: they are not done at `end`, a time of the event loop.
        """
        tokenizers = self.translator.tokenizers
        pairs = [(src, tgt) if tgt.strip() else ("", "") for src, tgt in zip(srcs, tgts, strict=True)]
        with self._admitted(sum(n_scored_tokens(tokenizers, *pair) for pair in pairs), refuse=False):
            return await self._in_batches(self.translator.align, pairs, 1, end)

    async def score(self, srcs: Sequence[str], tgts: Sequence[Sequence[int]], *, end: float = math.inf) -> list[Score]:
        """Score translations, as token ids, in another thread: see `Translator.score`. Empty ones have no tokens.

        Raises `ExpiredError`: they are not done at `end`, a time of the event loop.
        """
        srcs = [src if len(tgt) else "" for src, tgt in zip(srcs, tgts, strict=True)]
        n_tokens = sum(map(len, [*self.translator.tokenizers.src.encode_batch(srcs), *tgts]))
        with self._admitted(n_tokens, refuse=False):
            return await self._in_batches(self.translator.score, list(zip(srcs, tgts, strict=True)), _SCORED, end)

    async def _in_batches(
        self,
        work: Callable[[list[str], list[TargetT]], list[ResultT]],
        pairs: Sequence[tuple[str, TargetT]],
        size: int,
        end: float,
    ) -> list[ResultT]:
        """The results of `work` in another thread, which stops between batches if time is up or the caller leaves."""
        found: list[ResultT] = []
        for start in range(0, len(pairs), size):
            if self._loop.time() > end:
                raise ExpiredError(EXPIRED)
            some = pairs[start : start + size]
            found += await asyncio.to_thread(work, [src for src, _ in some], [tgt for _, tgt in some])
        return found

    def stream(
        self,
        text: str,
        options: TranslationOptions = _DEFAULT,
        *,
        seconds: float = math.inf,
        prefix: str = "",
        refuse: bool = True,
    ) -> AsyncGenerator[str | Translation]:
        """Translate one sentence: yields the beginning of the output as it grows, then the translation.

        With beams, the beginning is what all live hypotheses share. `refuse`: see `Admission.tokens`.
        """
        (source,) = self.translator.encode([text], options, prefixes=[prefix])
        known: list[int] = []

        async def run(on_part: Callable[[str], object]) -> Translation:
            if isinstance(source, Translation):
                return source

            def on_tokens(place: int, tokens: tuple[int, ...]) -> bool:
                known.extend(tokens)
                on_part(self.translator.tokenizers.tgt.decode(known))
                return False

            with self._admitted(self._cost([source], options), refuse=refuse):
                (found,) = await self._decode([source], options, seconds=seconds, on_tokens=on_tokens)
            return self._translation(source, found)

        return in_parts(run)

    def _translation(self, source: Source, hypotheses: Sequence[Hypothesis]) -> Translation:
        found = self.translator.decode(source, hypotheses)
        self.n_new += len(found.ids)
        return found

    def _cost(self, sources: Sequence[Source], options: TranslationOptions) -> int:
        """Tokens of the sources, once for each beam."""
        n_beams = max(options.beam or self.translator.settings.beam, options.n_best)
        return n_beams * sum(len(source.ids) for source in sources)
