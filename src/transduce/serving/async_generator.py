"""Continue prompts from asyncio: the texts of all callers share one queue."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from transduce.config.decoding import DecodingOptions
from transduce.decoding.engine import DecodingInput, Hypothesis
from transduce.decoding.generator import Continuation, Generator
from transduce.decoding.incremental_detokenizer import IncrementalDetokenizer
from transduce.decoding.queue import DecodingQueue
from transduce.serving.concurrency import remaining
from transduce.serving.limits import Admission


@dataclass(frozen=True, slots=True)
class Completion:
    """A continuation of a prompt.

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
    """The continuations of the prompts of a call: each with its samples, in order. n_prompt: tokens of all prompts."""

    texts: tuple[Completion, ...]
    n_prompt: int

    @property
    def n_new(self) -> int:
        return sum(len(one.ids) for one in self.texts)


Part = tuple[int, str]
"""The number of a text, and how it continues."""


class AsyncTextGenerator:
    """A language model for one event loop.

    Attributes:
        queue: Decodes for all callers.
        n_new: Tokens of all results so far.
    """

    def __init__(self, generator: Generator, admission: Admission) -> None:
        """Open the queue; call this inside a running event loop. `admission`: refuses work when too much is waiting."""
        self.generator, self._admission = generator, admission
        self.queue, self.n_new = DecodingQueue(generator.engine), 0

    async def warm_up(self) -> None:
        """Generate something: the first time takes longer. Never refused."""
        options = DecodingOptions(max_length=2)
        texts = [_Text(one, self._detokenizer()) for one in self.generator.start([""], options, cut_prompt=False)]
        await self._run(texts, options, math.inf, is_watched=False)

    async def close(self) -> None:
        await self.queue.close()

    def _detokenizer(self, stop: Sequence[str] = ()) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.generator.tokenizer, stop)

    async def generate(
        self,
        prompts: Sequence[str],
        options: DecodingOptions,
        *,
        cut_prompt: bool = False,
        stop: Sequence[str] = (),
        end: float = math.inf,
        on_part: Callable[[Part], object] | None = None,
    ) -> Completions:
        """Continue prompts; the texts are those of `Generator.generate`, bit for bit, up to a stop string.

        Args:
            prompts: The prompts.
            options: How to continue them.
            cut_prompt: See `Generator.generate`.
            stop: Strings before which a text ends.
            end: Time of the event loop at which the work is given up.
            on_part: Sees the texts as they grow.

        Raises:
            DataError: A prompt is longer than the context.
            ExpiredError: `end` has passed.
            OverloadedError: Too much is waiting.
        """
        started = self.generator.start(prompts, options, cut_prompt=cut_prompt)
        texts = [_Text(one, self._detokenizer(stop), place=place, on_part=on_part) for place, one in enumerate(started)]
        n_wanted = sum(len(one.ids) + one.limit for one in started)
        with self._admission.tokens(n_wanted):
            is_watched = bool(stop) or on_part is not None
            await self._run(texts, options, end, is_watched=is_watched)
        n_prompt = sum(one.n_given for one in started[:: options.n_best])
        found = Completions(tuple(one.completion() for one in texts), n_prompt)
        self.n_new += found.n_new
        return found

    async def _run(self, texts: Sequence[_Text], options: DecodingOptions, end: float, *, is_watched: bool) -> None:
        """Complete all texts, in rounds: in each, all until their context is full."""
        options = self.generator.options_of_a_text(options)
        while inputs := {
            place: one for place, text in enumerate(texts) if (one := text.next_input(self.generator)) is not None
        }:
            running = [texts[place] for place in inputs]
            found = await self.queue.decode(
                list(inputs.values()),
                options,
                seconds=remaining(end),
                on_tokens=partial(_add, running) if is_watched else None,
            )
            for text, hypotheses in zip(running, found, strict=True):
                text.extend(hypotheses)


class _Text:
    def __init__(
        self,
        tokens: Continuation,
        detokenizer: IncrementalDetokenizer,
        *,
        place: int = 0,
        on_part: Callable[[Part], object] | None = None,
    ) -> None:
        self._tokens, self._detokenizer, self._place, self._on_part = tokens, detokenizer, place, on_part
        self._parts: list[str] = []

    def next_input(self, generator: Generator) -> DecodingInput | None:
        """See `Generator.next_input`; None: the text is complete."""
        return None if self._detokenizer.is_stopped else generator.next_input(self._tokens)

    def add(self, tokens: Sequence[int]) -> bool:
        """Take tokens as they come; True: the text is complete."""
        self._take(self._detokenizer.add(tokens))
        return self._detokenizer.is_stopped

    def extend(self, hypotheses: Sequence[Hypothesis]) -> None:
        """Take what an engine found; nothing where `add` has completed the text."""
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
                self._on_part((self._place, part))


def _add(texts: Sequence[_Text], place: int, tokens: Sequence[int]) -> bool:
    return texts[place].add(tokens)
