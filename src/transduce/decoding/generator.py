"""Prompts in, continued text out: `Generator`, for runs of task "causal"."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from transduce.config.decoding import DecodingOptions
from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.data.examples import RowExample
from transduce.data.store import TextStore
from transduce.decoding.engine import BATCH_TOKENS, DecodingInput, Engine, Hypothesis, OnToken
from transduce.decoding.incremental_detokenizer import IncrementalDetokenizer
from transduce.decoding.loading import GIVEN, AnyPrecision, EngineChoice, EngineModel, open_engine
from transduce.decoding.results import Generation, TextLogProbs, TextScore
from transduce.errors import DataError, SettingsError
from transduce.text.hub import HubTokenizer
from transduce.text.special import BOS, EOS
from transduce.text.tokenizer import Tokenizer

SCORED_ROWS = 256  # rows of running text scored at once

_DEFAULT = DecodingOptions(sample=True)


class _Abandoned(Exception):
    """The reader of a stream has gone."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """A text in progress.

    key: the numbers of its prompt and sample. ids: all, of which the prompt has n_given. limit: most new ones. part:
    number of contexts that it has filled.
    """

    key: tuple[int, int]
    ids: tuple[int, ...]
    n_given: int
    limit: int
    part: int = 0
    log_prob: float = 0.0
    finished: bool = False

    @property
    def new_ids(self) -> tuple[int, ...]:
        """The ids that continue the prompt."""
        return self.ids[self.n_given :]

    def extended(self, new: Hypothesis) -> Continuation:
        """The text with what an engine found for `Generator.next_input`."""
        log_prob = self.log_prob + new.log_prob
        return replace(self, ids=self.ids + new.ids, part=self.part + 1, log_prob=log_prob, finished=new.finished)


class Generator(EngineModel):
    """A language model with its vocabulary. Safe to use from several threads.

    >>> generator = Generator.load("runs/x")                          # doctest: +SKIP
    >>> generator.generate(["ROMEO:"])[0].text                        # doctest: +SKIP
    """

    task = "causal"

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | HubTokenizer,
        settings: Settings,
        *,
        choice: EngineChoice = GIVEN,
    ) -> None:
        """Wrap an engine: `TorchEngine(model)`, for a decoder-only model in eval mode.

        `settings`: those of the run. `choice`: why it is this engine.
        """
        super().__init__(engine, choice)
        self.tokenizer, self.settings = tokenizer, settings
        self.context = resolved(settings.data.context, "data.context")
        self.memory = settings.model.remembered
        """Tokens before a segment of `context` tokens that the model remembers; None: it sees `context` tokens only."""
        self._begins = settings.data.documents != "file"

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str = "auto",
        precision: AnyPrecision = "float32",
        memory: int | None = None,
    ) -> Generator:
        """The same as `Translator.load`. `memory`: tokens that a model with a memory remembers; default: the run's."""
        folder, tokenizers, engine, choice = open_engine(
            path, task=cls.task, device=device, precision=precision, memory=memory
        )
        assert isinstance(tokenizers.tgt, Tokenizer | HubTokenizer), "a language model has one of these"
        return cls(engine, tokenizers.tgt, folder.settings, choice=choice)

    def generate(
        self, prompts: Sequence[str], options: DecodingOptions = _DEFAULT, *, cut_prompt: bool = False
    ) -> list[Generation]:
        """Continue each prompt: `options.n_best` samples per prompt, in order.

        `cut_prompt`: of a prompt that is longer than the model's context, the beginning is cut off.

        What is drawn is a function of the model, the prompt, its place, the seed and the sampling; the other prompts do
        not change it. A text that outgrows the model's context is continued from the last half context, unless the
        model has a memory.

        Raises:
            DataError: A prompt is longer than the context, and `cut_prompt` is not set.
            SettingsError: The options ask for a search.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts must be a list of texts, not one text: generate([text])")
        return [
            Generation(prompts[one.key[0]], self.tokenizer.decode(one.new_ids), one.new_ids, one.log_prob, one.finished)
            for one in self._run(self.start(prompts, options, cut_prompt=cut_prompt), options)
        ]

    def stream(self, prompt: str, options: DecodingOptions = _DEFAULT, *, cut_prompt: bool = False) -> Iterator[str]:
        """Yield what `generate` returns for one prompt in parts, as it is written. No part ends within a character.

        Closing the iterator stops the computation.
        """
        text, *_ = self.start([prompt], options, cut_prompt=cut_prompt)
        detokenizer = IncrementalDetokenizer(self.tokenizer)
        tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        abandoned = threading.Event()  # Ctrl-C, a closed pipe, `close()`

        def on_token(place: int, token: int) -> None:
            if abandoned.is_set():
                raise _Abandoned
            tokens.put(token)

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(self._run, [text], options, on_token)
            done.add_done_callback(lambda _: tokens.put(None))
            try:
                while (token := tokens.get()) is not None:
                    if part := detokenizer.add([token]):
                        yield part
                done.result()
            finally:
                abandoned.set()  # the thread stops at its next token
        if part := detokenizer.end():
            yield part

    def start(self, prompts: Sequence[str], options: DecodingOptions, *, cut_prompt: bool) -> list[Continuation]:
        """The texts of `generate`, of which nothing is written yet. Raises as it does."""
        limit, samples = self.options_of_a_text(options).max_length, range(options.n_best)
        encoded = [self._prompt(text, number, cut_prompt=cut_prompt) for number, text in enumerate(prompts)]
        return [Continuation((n, i), ids, len(ids), limit) for n, ids in enumerate(encoded) for i in samples]

    def options_of_a_text(self, options: DecodingOptions) -> DecodingOptions:
        """All options with which an engine continues one text. Raises `SettingsError` if they ask for a search."""
        given = options.model_dump(exclude_unset=True) | {"sample": True, "n_best": 1}
        return DecodingOptions(**given).over(self.settings.decoding)

    def next_input(self, text: Continuation) -> DecodingInput | None:
        """The prompt that an engine continues next; None: the text is complete.

        The engine reads the whole text, or its last half context where the text fills the context.
        """
        left = text.limit - len(text.new_ids)
        if text.finished or not left:
            return None
        if self.memory is not None:
            return DecodingInput((text.part, *text.key), text.ids, left)
        window = text.ids if len(text.ids) <= self.context else text.ids[-(self.context // 2) :]
        room = self.context + 1 - len(window)  # the last token is never read
        return DecodingInput((text.part, *text.key), window, min(left, room))

    def score(self, texts: Sequence[str]) -> list[TextLogProbs]:
        """Log-probability of each text as a whole document, token by token; the last token is the end.

        A text longer than the context is scored in parts, each without the one before it, unless the model has a
        memory.
        """
        rows, owners = list[np.ndarray](), list[int]()
        for number, ids in enumerate(self.tokenizer.encode_batch(texts)):
            framed = np.array([BOS, *ids, EOS], dtype=np.int64)
            length = self.context if self.memory is None else len(framed)
            for start in range(1, len(framed), length):
                rows.append(framed[start - 1 : start + length])
                owners.append(number)
        found: list[list[float]] = [[] for _ in texts]
        for number, known in zip(owners, self._log_probs(rows, self.settings.decoding.batch_tokens), strict=True):
            found[number] += known
        return [TextLogProbs(tuple(known)) for known in found]

    def evaluate(self, store: TextStore, *, stride: int | None = None, batch_tokens: int | None = None) -> TextScore:
        """Score running text, every token once, in rows of the context's length.

        With `stride` below the context the rows overlap: each token is predicted from at least context - stride tokens
        before it, at more cost. A model with a memory reads the text as one row.
        """
        if self.memory is not None:
            for name, value in (("stride", stride), ("batch_tokens", batch_tokens)):
                if value is not None:
                    raise SettingsError(
                        f"{name} = {value}: this model has a memory and reads the text as one row; leave it out"
                    )
            return self._evaluate_stream(store)
        stride = self.context if stride is None else stride
        if not 1 <= stride <= self.context:
            raise SettingsError(f"stride = {stride}: must be from 1 to the context, {self.context}")

        def rows() -> Iterator[tuple[np.ndarray, int]]:  # a row, and how many of its targets were scored before
            ids = store.ids
            for start in range(1, len(ids), stride):
                end = min(len(ids), start + stride)
                first = max(1, start + stride - self.context)
                yield np.asarray(ids[first - 1 : end], dtype=np.int64), start - first

        nats, n_tokens = 0.0, 0
        budget = max(self.context, batch_tokens or self.settings.decoding.batch_tokens)
        remaining = rows()
        while batch := list(islice(remaining, SCORED_ROWS)):
            for (row, skip), known in zip(batch, self._log_probs([row for row, _ in batch], budget), strict=True):
                real = row[1 + skip :] != BOS
                nats -= float(np.asarray(known[skip:])[real].sum())
                n_tokens += int(real.sum())
        return TextScore(nats=nats, n_tokens=n_tokens, n_bytes=store.n_bytes, context=self.context, stride=stride)

    def _evaluate_stream(self, store: TextStore) -> TextScore:
        """Score running text as one row, whose memory reaches from part to part."""
        row = np.asarray(store.ids, dtype=np.int64)
        known = np.asarray(self._log_probs([row])[0])[row[1:] != BOS]
        return TextScore(
            nats=-float(known.sum()),
            n_tokens=len(known),
            n_bytes=store.n_bytes,
            context=self.context,
            stride=self.context,
            memory=self.memory,
        )

    def _prompt(self, text: str, number: int, *, cut_prompt: bool) -> tuple[int, ...]:
        """The ids of a prompt. It begins with BOS where documents do so in training, and where it is empty."""
        ids = self.tokenizer.encode(text)
        ids = [BOS, *ids] if self._begins or not ids else ids
        if len(ids) > self.context and self.memory is None:
            if not cut_prompt:
                raise DataError(
                    f"prompt {number + 1} has {len(ids)} tokens; the context of this model is {self.context}; shorten "
                    "it, or cut its beginning off with cut_prompt"
                )
            ids = ids[-self.context :]
        return tuple(ids)

    def _run(
        self, texts: list[Continuation], options: DecodingOptions, on_token: OnToken | None = None
    ) -> list[Continuation]:
        """All texts, complete. `on_token` sees the tokens of the only one as they are written.

        Texts advance in rounds: in each, all until their context is full.
        """
        options = self.options_of_a_text(options)
        while inputs := {place: one for place, text in enumerate(texts) if (one := self.next_input(text)) is not None}:
            found = self.engine.translate(list(inputs.values()), options, on_token=on_token)
            for place, (new,) in zip(inputs, found, strict=True):
                texts[place] = texts[place].extended(new)
        return texts

    def _log_probs(self, rows: Sequence[np.ndarray], batch_tokens: int = BATCH_TOKENS) -> list[list[float]]:
        """Log-probability of every token of each row but the first, given those before it."""
        examples = [RowExample(row[:-1], row[1:]) for row in rows]
        return self.engine.score_rows(
            examples, separate=self.settings.data.separate_documents, batch_tokens=batch_tokens
        )
