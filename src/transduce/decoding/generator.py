"""Prompts in, continued text out: `Generator`, for runs of task "causal"."""

from __future__ import annotations

import codecs
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

import numpy as np

from transduce.config import Settings, resolved
from transduce.data.examples import RowExample
from transduce.data.store import TextStore
from transduce.decoding.engine import Engine, Source
from transduce.decoding.loading import GIVEN, EngineChoice, EngineModel, open_engine
from transduce.decoding.options import GenerationOptions
from transduce.decoding.precision import AnyPrecision
from transduce.decoding.results import Generation, Score, TextScore
from transduce.errors import DataError, SettingsError
from transduce.runs.folder import RunFolder
from transduce.text.hub import HubTokenizer
from transduce.text.special import BOS, EOS, PAD
from transduce.text.tokenizer import Tokenizer, Tokenizers

SCORED_ROWS = 256  # rows of running text scored at once

OnToken = Callable[[int], None]
_DEFAULT = GenerationOptions()


class _Abandoned(Exception):
    """The reader of a stream has gone."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A text in progress: the numbers of its prompt and sample, all its ids, and how many of them are the prompt's."""

    key: tuple[int, int]
    ids: tuple[int, ...]
    n_given: int
    log_prob: float = 0.0
    finished: bool = False

    @property
    def n_new(self) -> int:
        return len(self.ids) - self.n_given


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
        """The same as `EngineModel.load`. `memory`: tokens that a model with a memory remembers; default: the run's."""
        return cls._from_run(*open_engine(path, task=cls.task, device=device, precision=precision, memory=memory))

    @classmethod
    def _from_run(cls, folder: RunFolder, tokenizers: Tokenizers, engine: Engine, choice: EngineChoice) -> Generator:
        assert isinstance(tokenizers.tgt, Tokenizer | HubTokenizer), "a language model has one of these"
        return cls(engine, tokenizers.tgt, folder.settings, choice=choice)

    def generate(self, prompts: Sequence[str], options: GenerationOptions = _DEFAULT) -> list[Generation]:
        """Continue each prompt: `options.n_samples` texts per prompt, in order.

        What is drawn is a function of the model, the prompt, its place, the seed and the sampling; the other prompts do
        not change it. A text that outgrows the model's context is continued from the last half context, unless the
        model has a memory.

        Raises:
            DataError: A prompt is longer than the context, and `options.cut_prompt` is not set.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts must be a list of texts, not one text: generate([text])")
        encoded = [self._prompt(text, number, options) for number, text in enumerate(prompts)]
        jobs = [_Job((n, i), ids, len(ids)) for n, ids in enumerate(encoded) for i in range(options.n_samples)]
        found = []
        for job in self._run(jobs, options):
            new = job.ids[job.n_given :]
            found.append(Generation(prompts[job.key[0]], self.tokenizer.decode(new), new, job.log_prob, job.finished))
        return found

    def stream(self, prompt: str, options: GenerationOptions = _DEFAULT) -> Iterator[str]:
        """Yield what `generate` returns for one prompt in parts, as it is written. No part ends within a character.

        Closing the iterator stops the computation.
        """
        ids = self._prompt(prompt, 0, options)
        tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        abandoned = threading.Event()  # Ctrl-C, a closed pipe, `close()`

        def on_token(token: int) -> None:
            if abandoned.is_set():
                raise _Abandoned
            tokens.put(token)

        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(self._run, [_Job((0, 0), ids, len(ids))], options, on_token)
            done.add_done_callback(lambda _: tokens.put(None))
            try:
                while (token := tokens.get()) is not None:
                    if text := decoder.decode(self.tokenizer.bytes_of[token]):
                        yield text
                done.result()
            finally:
                abandoned.set()  # the thread stops at its next token
        if text := decoder.decode(b"", final=True):
            yield text

    def score(self, texts: Sequence[str], *, batch_tokens: int | None = None) -> list[Score]:
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
        for number, known in zip(owners, self._log_probs(rows, batch_tokens), strict=True):
            found[number] += known
        return [Score(tuple(known)) for known in found]

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
        known = np.asarray(self._log_probs([row], None)[0])[row[1:] != BOS]
        return TextScore(
            nats=-float(known.sum()),
            n_tokens=len(known),
            n_bytes=store.n_bytes,
            context=self.context,
            stride=self.context,
            memory=self.memory,
        )

    def _prompt(self, text: str, number: int, options: GenerationOptions) -> tuple[int, ...]:
        """The ids of a prompt. It begins with BOS where documents do so in training, and where it is empty."""
        ids = self.tokenizer.encode(text)
        ids = [BOS, *ids] if self._begins or not ids else ids
        if len(ids) > self.context and self.memory is None:
            if not options.cut_prompt:
                raise DataError(
                    f"prompt {number + 1} has {len(ids)} tokens; the context of this model is {self.context}; shorten "
                    "it, or cut its beginning off (--cut-prompt)"
                )
            ids = ids[-self.context :]
        return tuple(ids)

    def _run(self, jobs: list[_Job], options: GenerationOptions, on_token: OnToken | None = None) -> list[_Job]:
        """All jobs, finished. `on_token` sees the tokens of the only one as they are written.

        Jobs advance in rounds: in each, all until their context is full.
        """
        limit = self.settings.decoding.max_length if options.max_length is None else options.max_length
        for part in count():
            places = [place for place, job in enumerate(jobs) if not job.finished and job.n_new < limit]
            if not places:
                break
            extended = self._extend([jobs[place] for place in places], limit, part, options, on_token)
            for place, job in zip(places, extended, strict=True):
                jobs[place] = job
        return jobs

    def _window(self, job: _Job) -> tuple[int, ...]:
        """What the model reads: the whole text, or its last half context where the text fills the context."""
        fits = len(job.ids) <= self.context or self.memory is not None
        return job.ids if fits else job.ids[-(self.context // 2) :]

    def _extend(
        self, jobs: Sequence[_Job], limit: int, part: int, options: GenerationOptions, on_token: OnToken | None
    ) -> list[_Job]:
        """Jobs, each extended to `limit` new tokens or a full context."""

        def watch(places: list[int], tokens: list[list[int]]) -> None:
            if on_token and places[0] == 0 and tokens[0][0] != PAD:
                on_token(tokens[0][0])

        prompts = []
        for job in jobs:
            window = self._window(job)
            room = limit if self.memory is not None else self.context + 1 - len(window)  # the last token is never read
            prompts.append(Source((part, *job.key), window, min(limit - job.n_new, room)))
        found = self.engine.sample(prompts, options.sampling, seed=options.seed, watch=watch if on_token else None)
        return [
            replace(job, ids=job.ids + new.ids, log_prob=job.log_prob + new.log_prob, finished=new.finished)
            for job, new in zip(jobs, found, strict=True)
        ]

    def _log_probs(self, rows: Sequence[np.ndarray], batch_tokens: int | None) -> list[list[float]]:
        """Log-probability of every token of each row but the first, given those before it."""
        examples = [RowExample(row[:-1], row[1:]) for row in rows]
        return self.engine.score_rows(
            examples, separate=self.settings.data.separate_documents, batch_tokens=batch_tokens
        )
