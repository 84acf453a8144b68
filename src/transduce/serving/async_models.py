"""The models of a service, for asyncio. The sentences and texts of all callers of a model share one queue."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from transduce.config.decoding import DecodingOptions
from transduce.config.settings import Direction
from transduce.data.store import Example
from transduce.decoding.alignment import Alignment, Link
from transduce.decoding.engine import DecodingInput, Hypothesis
from transduce.decoding.generator import Continuation, Generator, IncrementalDetokenizer
from transduce.decoding.queue import BURST, DecodingQueue, expiring
from transduce.decoding.results import TextLogProbs, Translation
from transduce.decoding.translator import EncodedSource, Translator
from transduce.errors import DataError
from transduce.process import n_threads_to_use
from transduce.serving.access import Admission

_DEFAULT = DecodingOptions()
_PIECE = 2048  # tokens scored at once: enough to be fast, few enough to stop soon after a client disconnects

PartT = TypeVar("PartT")
ResultT = TypeVar("ResultT")


async def in_parts(
    work: Callable[[Callable[[PartT], object]], Awaitable[ResultT]],
) -> AsyncGenerator[PartT | ResultT]:
    """Yield the values that `work` passes to its callback, then its result. Closing the generator cancels `work`."""
    parts: asyncio.Queue[PartT | None] = asyncio.Queue()
    running = asyncio.ensure_future(work(parts.put_nowait))
    running.add_done_callback(lambda _: parts.put_nowait(None))
    try:
        while (part := await parts.get()) is not None:
            yield part
        yield await running
    finally:
        running.cancel()
        await asyncio.wait([running])  # wait until `Admission` no longer counts the tokens of the work


async def offload(n_sentences: int, work: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """Call `work`, in another thread if it handles many sentences, so that other requests proceed."""
    if n_sentences <= BURST:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)


def _remaining(end: float) -> float:
    """Seconds until `end`, a time of the event loop; at least 0."""
    return max(end - asyncio.get_running_loop().time(), 0.0)


class AsyncTranslator:
    """A translator for one event loop.

    Attributes:
        queue: The queue that decodes for all callers.
        n_new: Number of tokens of all results so far, in all directions.
    """

    def __init__(self, translator: Translator, admission: Admission) -> None:
        """Open the queue; call this inside a running event loop. `admission`: refuses work when too much is waiting."""
        self.translator, self._admission = translator, admission
        self.queue, self.n_new = DecodingQueue(translator.engine), 0
        self._whole, self._directions = self, dict[Direction, AsyncTranslator]()
        self._threads = ThreadPoolExecutor(n_threads_to_use(), thread_name_prefix="score")

    def between(self, src_lang: str, tgt_lang: str) -> AsyncTranslator:
        """Return a translator for other languages of the model, with the same queue. See `Translator.between`."""
        if (src_lang, tgt_lang) not in self._directions:
            other = copy.copy(self)
            other.translator = self.translator.between(src_lang, tgt_lang)
            self._directions[src_lang, tgt_lang] = other
        return self._directions[src_lang, tgt_lang]

    async def translate(
        self,
        texts: Sequence[str],
        options: DecodingOptions = _DEFAULT,
        *,
        end: float = math.inf,
        prefixes: Sequence[str] = (),
        refuse: bool = True,
    ) -> list[Translation]:
        """Translate sentences. The results equal the results of `Translator.translate`, bit for bit.

        Args:
            texts: The sentences.
            options: Decoding options.
            end: Time of the event loop at which the work is cancelled.
            prefixes: The beginning of each translation, if any.
            refuse: See `Admission.tokens`.

        Raises `DataError` (a sentence is longer than the model takes), `ExpiredError` and `OverloadedError`.
        """
        options = options.over(self.translator.settings)
        encoded = await offload(len(texts), self._encode, texts, options, prefixes)
        sources = [text.input for text in encoded if isinstance(text, EncodedSource)]
        n_tokens = options.beam * sum(len(source.ids) + source.limit for source in sources)
        with self._admission.tokens(n_tokens, refuse=refuse):
            results = iter(await self.queue.decode(sources, options, seconds=_remaining(end)))

        def decoded() -> list[Translation]:
            return [
                self.translator.decode(text, next(results), options) if isinstance(text, EncodedSource) else text
                for text in encoded
            ]

        translations = await offload(len(texts) * options.n_best, decoded)
        self._whole.n_new += sum(len(text.ids) for text in translations)
        return translations

    async def warm_up(self) -> None:
        """Translate a text once, because the first call is slower. It is never refused."""
        await self.translate(["1 2 3"], refuse=False)

    async def align(
        self, srcs: Sequence[str], tgts: Sequence[str | Translation], *, end: float = math.inf
    ) -> list[list[Link]]:
        """Align the words of sentence pairs, in turn. Empty targets get no links. See `Translator.align`."""
        links: list[list[Link]] = []
        async with expiring(end):
            for src, tgt in zip(srcs, tgts, strict=True):
                text = tgt if isinstance(tgt, str) else tgt.text
                if not text.strip():
                    links.append([])
                    continue
                if self.translator.guided_head is not None:  # alignment by a trained head takes at most one pass
                    links += await self._in_thread(self.translator.align, [src], [tgt])
                    continue
                pair = await self._in_thread(Alignment.read, self.translator.tokenizers, src, text)
                self.translator.require_length(pair.src.ids, pair.tgt.ids)
                links.append(pair.links(await self._score(await self._in_thread(pair.pairs))))
        return links

    async def score(
        self, srcs: Sequence[str], tgts: Sequence[Sequence[int]], *, end: float = math.inf
    ) -> list[TextLogProbs]:
        """Score translations, given as token ids. Empty translations get no scores. See `Translator.score`."""
        srcs = [src if len(tgt) else "" for src, tgt in zip(srcs, tgts, strict=True)]
        async with expiring(end):
            pairs = await self._in_thread(self.translator.pairs, srcs, tgts)
            log_probs = await self._score([pair for pair in pairs if pair is not None])
        return self.translator.text_log_probs(pairs, log_probs)

    async def _score(self, pairs: Sequence[Example]) -> list[list[float]]:
        """Score pairs with `Engine.score`, a few at a time, so that other requests proceed and cancellation is quick.

        Only the current pairs count as open tokens, so that they do not keep out other callers.
        """
        log_probs: list[list[float]] = []
        for piece, n_tokens in _pieces(pairs):
            with self._admission.tokens(n_tokens, refuse=False):
                log_probs += await self._in_thread(self.translator.engine.score, piece)
        return log_probs

    async def _in_thread(self, work: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Call `work` in a thread for scoring.

        There are as many threads for scoring as for decoding, so that both kinds of work proceed.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *arguments))

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self.queue.close()

    def _encode(
        self, texts: Sequence[str], options: DecodingOptions, prefixes: Sequence[str]
    ) -> list[EncodedSource | Translation]:
        encoded = list(self.translator.encode(texts, options, prefixes=prefixes))
        for text, result in zip(texts, encoded, strict=True):
            # Clients of most protocols would not see the note.
            if isinstance(result, Translation) and result.note and not result.text:
                raise DataError(f"{text[:40]!r}: {result.note}; cut it into shorter sentences")
        return encoded


def _pieces(pairs: Sequence[Example]) -> Iterator[tuple[list[Example], int]]:
    """Split pairs into pieces of about `_PIECE` tokens. Yields each piece with its number of tokens."""
    piece, n_tokens = list[Example](), 0
    for pair in pairs:
        piece.append(pair)
        n_tokens += len(pair.src) + len(pair.tgt)
        if n_tokens >= _PIECE:
            yield piece, n_tokens
            piece, n_tokens = [], 0
    if piece:
        yield piece, n_tokens


class Completion(NamedTuple):
    """A continuation of a prompt: the text before the stop string, and the tokens up to the end of the stop string.

    finished: False if the text was cut off at the length limit. log_probs: Log-probability of each token in nats, or
    None if not requested. tokens: The text that each token completes; empty if not requested.
    """

    text: str
    ids: tuple[int, ...]
    finished: bool
    tokens: Sequence[str] = ()
    log_probs: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Completions:
    """The continuations of a call's prompts: all samples of each prompt, in order. n_prompt: tokens of all prompts."""

    texts: list[Completion]
    n_prompt: int

    @property
    def n_new(self) -> int:
        return sum(len(text.ids) for text in self.texts)


Part = tuple[int, str]
"""The index of a text in a call, and its next characters."""


class AsyncTextGenerator:
    """A language model for one event loop.

    Attributes:
        queue: The queue that decodes for all callers.
        n_new: Number of tokens of all results so far.
    """

    def __init__(self, generator: Generator, admission: Admission) -> None:
        """Open the queue; call this inside a running event loop. `admission`: refuses work when too much is waiting."""
        self.generator, self._admission = generator, admission
        self.queue, self.n_new = DecodingQueue(generator.engine), 0

    async def warm_up(self) -> None:
        """Generate a text once, because the first call is slower. It is never refused."""
        await self.generate([""], DecodingOptions(max_length=2), refuse=False)

    async def close(self) -> None:
        await self.queue.close()

    async def generate(
        self,
        prompts: Sequence[str],
        options: DecodingOptions,
        *,
        cut_prompt: bool = False,
        stop: Sequence[str] = (),
        end: float = math.inf,
        refuse: bool = True,
        on_part: Callable[[Part], object] | None = None,
        log_probs: bool = False,
    ) -> Completions:
        """Continue prompts. The texts equal the texts of `Generator.generate`, bit for bit, up to a string of `stop`.

        `on_part`: called with new parts of the texts. `log_probs`: compute log-probabilities of tokens. The other
        arguments are described at `Generator.generate` and `AsyncTranslator.translate`.

        Raises `DataError` (a prompt is longer than the context), `ExpiredError` and `OverloadedError`.
        """
        started = self.generator.start(prompts, options, cut_prompt=cut_prompt)
        texts = [
            _Text(tokens, IncrementalDetokenizer(self.generator.tokenizer, stop), number, on_part)
            for number, tokens in enumerate(started)
        ]
        n_wanted = sum(len(tokens.ids) + tokens.limit for tokens in started)
        with self._admission.tokens(n_wanted, refuse=refuse):
            options_of_text = self.generator.options_of_a_text(options)
            await self._complete(texts, options_of_text, end, watch=bool(stop) or on_part is not None)
            completed = [text.completion() for text in texts]
            if log_probs:
                async with expiring(end):
                    completed = [
                        await asyncio.to_thread(self._with_log_probs, tokens.ids[: tokens.n_given], text)
                        for tokens, text in zip(started, completed, strict=True)
                    ]
        n_prompt = sum(tokens.n_given for tokens in started[:: options.n_best])
        completions = Completions(completed, n_prompt)
        self.n_new += completions.n_new
        return completions

    def _with_log_probs(self, prompt: tuple[int, ...], text: Completion) -> Completion:
        detokenizer = IncrementalDetokenizer(self.generator.tokenizer)
        tokens = [detokenizer.add([token]) for token in text.ids]
        return text._replace(tokens=tokens, log_probs=self.generator.token_log_probs(prompt, text.ids))

    async def _complete(self, texts: Sequence[_Text], options: DecodingOptions, end: float, *, watch: bool) -> None:
        """Complete all texts, in rounds that each fill the context. `watch`: pass on new tokens as they come."""
        while inputs := {text: new for text in texts if (new := text.next_input(self.generator)) is not None}:
            running = list(inputs)
            results = await self.queue.decode(
                list(inputs.values()),
                options,
                seconds=_remaining(end),
                on_tokens=partial(_add, running) if watch else None,
            )
            for text, hypotheses in zip(running, results, strict=True):
                text.extend(hypotheses)


class _Text:
    """A text while it is generated. `number`: its index in the call."""

    def __init__(
        self,
        tokens: Continuation,
        detokenizer: IncrementalDetokenizer,
        number: int,
        on_part: Callable[[Part], object] | None,
    ) -> None:
        self._tokens, self._detokenizer, self._number, self._on_part = tokens, detokenizer, number, on_part
        self._parts: list[str] = []

    def next_input(self, generator: Generator) -> DecodingInput | None:
        """Return the next input to decode, or None if the text is complete. See `Generator.next_input`."""
        return None if self._detokenizer.is_stopped else generator.next_input(self._tokens)

    def add(self, tokens: Sequence[int]) -> bool:
        """Add new tokens. Returns whether a stop string has completed the text."""
        self._take(self._detokenizer.add(tokens))
        return self._detokenizer.is_stopped

    def extend(self, hypotheses: Sequence[Hypothesis]) -> None:
        """Add the tokens of the engine's hypothesis that `add` has not received yet."""
        for new in hypotheses:
            self._tokens = self._tokens.extended(new)
            self.add(self._tokens.new_ids[len(self._detokenizer.ids) :])

    def completion(self) -> Completion:
        self._take(self._detokenizer.end())
        finished = self._detokenizer.is_stopped or self._tokens.finished
        return Completion("".join(self._parts), tuple(self._detokenizer.ids), finished)

    def _take(self, part: str) -> None:
        if part:
            self._parts.append(part)
            if self._on_part is not None:
                self._on_part((self._number, part))


def _add(texts: Sequence[_Text], number: int, tokens: Sequence[int]) -> bool:
    return texts[number].add(tokens)
