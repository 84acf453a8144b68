"""Continue prompts from asyncio: the texts of all callers share one queue."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from transduce.decoding.engine import Hypothesis, Source
from transduce.decoding.generator import Continuation, Generator
from transduce.decoding.growing_text import GrowingText
from transduce.decoding.options import GenerationOptions, TranslationOptions
from transduce.serving.async_model import AsyncModel, in_parts
from transduce.serving.limits import Admission


@dataclass(frozen=True, slots=True)
class Completion:
    """What continues a prompt.

    Attributes:
        text: Without the prompt, and without the stop string.
        ids: Its tokens, up to the one that completed the stop string.
        finished: False where the text was cut off at the length limit.
    """

    text: str
    ids: tuple[int, ...]
    finished: bool


@dataclass(frozen=True, slots=True)
class Completions:
    """What continues the prompts of a call: each with its samples, in order. n_prompt: tokens of all prompts."""

    texts: tuple[Completion, ...]
    n_prompt: int

    @property
    def n_new(self) -> int:
        """Tokens of all texts."""
        return sum(len(one.ids) for one in self.texts)


Part = tuple[int, str]
"""The number of a text, and how it continues."""


class AsyncTextGenerator(AsyncModel):
    """A language model for one event loop: see `AsyncModel`.

    >>> generator = AsyncTextGenerator(Generator.load("runs/gpt"))   # doctest: +SKIP
    >>> (await generator.generate(["ROMEO:"])).texts[0].text         # doctest: +SKIP
    """

    def __init__(self, generator: Generator, *, admission: Admission | None = None) -> None:
        """Start the queue of a language model: see `AsyncModel`."""
        super().__init__(generator.engine, admission=admission)
        self.generator = generator

    async def warm_up(self) -> None:
        """Generate something: the first time takes longer. Never refused."""
        options = GenerationOptions(max_length=2)
        texts = [_Text(one, GrowingText(self.generator.tokenizer)) for one in self.generator.start([""], options)]
        await self._run(texts, options, math.inf, is_watched=False)

    async def generate(
        self,
        prompts: Sequence[str],
        options: GenerationOptions,
        *,
        stop: Sequence[str] = (),
        seconds: float = math.inf,
        on_part: Callable[[Part], object] | None = None,
    ) -> Completions:
        """Continue prompts; the texts are those of `Generator.generate`, bit for bit, up to a stop string.

        Args:
            prompts: The prompts.
            options: How to continue them.
            stop: Strings before which a text ends.
            seconds: Time after which the work is given up.
            on_part: Sees the texts as they grow.

        Raises:
            DataError: A prompt is longer than the context.
            ExpiredError: `seconds` have passed.
            OverloadedError: Too much is waiting.
        """
        started = self.generator.start(prompts, options)
        texts = [
            _Text(one, GrowingText(self.generator.tokenizer, stop), place=place, on_part=on_part)
            for place, one in enumerate(started)
        ]
        n_wanted = sum(len(one.ids) + one.limit for one in started)
        with self._admitted(n_wanted):
            is_watched = bool(stop) or on_part is not None
            await self._run(texts, options, self._loop.time() + seconds, is_watched=is_watched)
        n_prompt = sum(one.n_given for one in started[:: options.n_samples])
        found = Completions(tuple(one.completion() for one in texts), n_prompt)
        self.n_new += found.n_new
        return found

    def stream(
        self, prompts: Sequence[str], options: GenerationOptions, *, stop: Sequence[str] = (), seconds: float = math.inf
    ) -> AsyncGenerator[Part | Completions]:
        """Continue prompts: yields parts of the texts as they grow, then what `generate` returns."""

        async def run(on_part: Callable[[Part], object]) -> Completions:
            return await self.generate(prompts, options, stop=stop, seconds=seconds, on_part=on_part)

        return in_parts(run)

    async def _run(self, texts: Sequence[_Text], options: GenerationOptions, end: float, *, is_watched: bool) -> None:
        """Complete all texts, in rounds: in each, all until their context is full."""
        decoding = TranslationOptions(sampling=options.sampling, seed=options.seed)
        while sources := {
            place: source
            for place, text in enumerate(texts)
            if (source := text.next_source(self.generator)) is not None
        }:
            running = [texts[place] for place in sources]
            found = await self._decode(
                list(sources.values()),
                decoding,
                seconds=max(end - self._loop.time(), 0.0),
                on_tokens=partial(_add, running) if is_watched else None,
            )
            for text, hypotheses in zip(running, found, strict=True):
                text.extend(hypotheses)


class _Text:
    """A text in progress, as tokens and as characters."""

    def __init__(
        self,
        tokens: Continuation,
        growing: GrowingText,
        *,
        place: int = 0,
        on_part: Callable[[Part], object] | None = None,
    ) -> None:
        self._tokens, self._growing, self._place, self._on_part = tokens, growing, place, on_part
        self._parts: list[str] = []

    def next_source(self, generator: Generator) -> Source | None:
        """See `Generator.next_source`; None: the text is complete."""
        return None if self._growing.is_stopped else generator.next_source(self._tokens)

    def add(self, tokens: Sequence[int]) -> bool:
        """Take tokens as they come; True: the text is complete."""
        self._take(self._growing.add(tokens))
        return self._growing.is_stopped

    def extend(self, hypotheses: Sequence[Hypothesis]) -> None:
        """Take what an engine found; nothing where `add` has completed the text."""
        for new in hypotheses:
            self._tokens = self._tokens.extended(new)
            self.add(self._tokens.new_ids[len(self._growing.ids) :])

    def completion(self) -> Completion:
        """The complete text."""
        self._take(self._growing.end())
        growing = self._growing
        return Completion("".join(self._parts), tuple(growing.ids), growing.is_stopped or self._tokens.finished)

    def _take(self, part: str) -> None:
        if part:
            self._parts.append(part)
            if self._on_part is not None:
                self._on_part((self._place, part))


def _add(texts: Sequence[_Text], place: int, tokens: Sequence[int]) -> bool:
    return texts[place].add(tokens)
