"""Text that goes on: `Generator`, for runs of task "causal"."""

from __future__ import annotations

import codecs
import math
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from transduce.config import Settings
from transduce.data.batch import collate_rows
from transduce.data.objectives import RowExample
from transduce.data.text_store import TextStore
from transduce.decoding.loading import Precision, open_model
from transduce.decoding.results import Generation, Score, TextScore
from transduce.decoding.sample import Sampling, sample
from transduce.decoding.score import token_log_probs
from transduce.decoding.search import Hypothesis
from transduce.errors import DataError, SettingsError
from transduce.text.hub import HubTokenizer
from transduce.text.tokenizer import BOS, EOS, PAD, Tokenizer

MOST = 64  # rows of a batch

See = Callable[[int], None]


class _Left(Exception):
    """Nobody reads the stream any more."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One text that is to go on: its number, that of its sample, all its ids, and how many of them were given."""

    number: int
    sample: int
    ids: tuple[int, ...]
    n_given: int
    log_prob: float = 0.0
    finished: bool = False


class Generator:
    """A language model with its vocabulary. Safe to use from several threads: nothing in it changes.

    `Generator.load("runs/x").generate(["ROMEO:"])[0].text` is how the text goes on.
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer | HubTokenizer, settings: Settings) -> None:
        """`settings`: those of the run, nothing in them left open."""
        self.model: Any = model  # of any kind that the MODELS table knows
        self.tokenizer, self.settings = tokenizer, settings
        assert settings.data.context is not None, "chosen in training"
        self.context: int = settings.data.context
        self._begins = settings.data.documents != "file"

    @classmethod
    def load(cls, path: str | Path, *, device: str = "auto", precision: Precision = "float32") -> Generator:
        """The generator in a run folder. Raises `RunFolderError` (missing, damaged), `SettingsError` (other task)."""
        folder, model, tokenizers = open_model(path, task="causal", device=device, precision=precision)
        assert isinstance(tokenizers.tgt, Tokenizer | HubTokenizer), "a language model has one of these"
        return cls(model, tokenizers.tgt, folder.settings)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_length: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 1,
        n_samples: int = 1,
        cut_prompt: bool = False,
    ) -> list[Generation]:
        """How each prompt goes on, by `n_samples` texts each, in order: at most `max_length` tokens (None: the run's).

        Temperature 0 takes the likeliest token each time; else tokens are drawn, and what is drawn is a function of the
        model, the prompt, its place, the seed and the sampling, not of what is drawn beside it. A prompt that is longer
        than the model can see is a `DataError`, or loses its beginning with `cut_prompt`. Where a text grows longer
        than the context of the training, the model goes on from the last half of it.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts must be a list of texts, not one text: generate([text])")
        sampling, limit = self._sampling(temperature, top_k, top_p), self._limit(max_length)
        if n_samples < 1:
            raise SettingsError(f"n_samples = {n_samples}: must be at least 1")
        jobs = [
            _Job(number, i, ids, len(ids))
            for number, ids in enumerate([self._prompt(text, n, cut_prompt) for n, text in enumerate(prompts)])
            for i in range(n_samples)
        ]
        done = self._grown(jobs, limit, sampling, seed)
        return [self._generation(prompts[job.number], job) for job in done]

    def stream(
        self,
        prompt: str,
        *,
        max_length: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 1,
        cut_prompt: bool = False,
    ) -> Iterator[str]:
        """What `generate` gives for one prompt, in parts, as the text comes; no part ends within a character.

        Whoever has seen enough may stop at any time: nothing more is then computed.
        """
        sampling, limit = self._sampling(temperature, top_k, top_p), self._limit(max_length)
        ids = self._prompt(prompt, 0, cut_prompt)
        tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        left = threading.Event()  # whoever reads has gone: Ctrl-C, a closed pipe, `close()`

        def see(token: int) -> None:
            if left.is_set():
                raise _Left
            tokens.put(token)

        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(self._grown, [_Job(0, 0, ids, len(ids))], limit, sampling, seed, see)
            done.add_done_callback(lambda _: tokens.put(None))
            try:
                while (token := tokens.get()) is not None:
                    if text := decoder.decode(self.tokenizer.bytes_of[token]):
                        yield text
                done.result()
            finally:
                left.set()  # the thread ends with its next token
        if text := decoder.decode(b"", final=True):
            yield text

    def score(self, texts: Sequence[str], *, batch_tokens: int | None = None) -> list[Score]:
        """How likely the model finds each text as a whole document: nats, token by token; the last is its end.

        Of a text longer than the context each part is scored from what stands before it in that part.
        """
        rows, owners = list[np.ndarray](), list[int]()
        for number, ids in enumerate(self.tokenizer.encode_batch(texts)):
            framed = np.array([BOS, *ids, EOS], dtype=np.int64)
            for start in range(1, len(framed), self.context):
                rows.append(framed[start - 1 : start + self.context])
                owners.append(number)
        found: list[list[float]] = [[] for _ in texts]
        for number, known in zip(owners, self._log_probs(rows, batch_tokens), strict=True):
            found[number] += known
        return [Score(tuple(known)) for known in found]

    def evaluate(self, store: TextStore, *, stride: int | None = None, batch_tokens: int | None = None) -> TextScore:
        """How well the model tells running text, every token once: rows of the context's length, side by side.

        With `stride` below the context rows overlap, and only what is new in each counts: each token is told from at
        least context - stride tokens before it, at more cost.
        """
        stride = self.context if stride is None else stride
        if not 1 <= stride <= self.context:
            raise SettingsError(f"stride = {stride}: must be from 1 to the context, {self.context}")

        def rows() -> Iterator[tuple[np.ndarray, int]]:
            ids = store.ids
            for start in range(1, len(ids), stride):
                end = min(len(ids), start + stride)
                first = max(1, start + stride - self.context)
                yield np.asarray(ids[first - 1 : end], dtype=np.int64), start - first

        nats, n_tokens = 0.0, 0
        kept = list[int]()
        pending = list[np.ndarray]()
        budget = max(self.context, batch_tokens or self.settings.decoding.batch_tokens)

        def settle() -> None:
            nonlocal nats, n_tokens
            for row, skip, known in zip(pending, kept, self._log_probs(pending, budget), strict=True):
                real = row[1 + skip :] != BOS
                nats -= float(np.asarray(known[skip:])[real].sum())
                n_tokens += int(real.sum())
            pending.clear()
            kept.clear()

        for row, skip in rows():
            pending.append(row)
            kept.append(skip)
            if len(pending) == 256:
                settle()
        settle()
        return TextScore(nats=nats, n_tokens=n_tokens, n_bytes=store.n_bytes, context=self.context, stride=stride)

    # -- what is asked for

    def _limit(self, max_length: int | None) -> int:
        limit = self.settings.decoding.max_length if max_length is None else max_length
        if limit < 1:
            raise SettingsError(f"max_length = {limit}: must be at least 1")
        return limit

    def _sampling(self, temperature: float, top_k: int, top_p: float) -> Sampling:
        if not 0 <= temperature < math.inf:  # nan too
            raise SettingsError(f"temperature = {temperature}: must be a number from 0 on")
        if top_k < 0 or not 0 <= top_p <= 1:
            raise SettingsError(f"top_k = {top_k}, top_p = {top_p}: must be at least 0, and from 0 to 1")
        return Sampling(top_k=1) if temperature == 0 else Sampling(temperature, top_k, top_p)

    def _prompt(self, text: str, number: int, cut: bool) -> tuple[int, ...]:
        """The ids that a text goes on from; what is a whole document begins with its beginning, as in training."""
        ids = self.tokenizer.encode(text)
        ids = [BOS, *ids] if self._begins or not ids else ids
        if len(ids) > self.context:
            if not cut:
                raise DataError(
                    f"prompt {number + 1} has {len(ids)} tokens; this model sees {self.context} at once; shorten it, "
                    "or have its beginning cut off (--cut-prompt)"
                )
            ids = ids[-self.context :]
        return tuple(ids)

    # -- growing

    def _grown(self, jobs: list[_Job], limit: int, sampling: Sampling, seed: int, see: See | None = None) -> list[_Job]:
        """All texts at their end, in the order of the jobs. `see` is told the tokens of the first as they come."""
        done: dict[tuple[int, int], _Job] = {}
        going, part = jobs, 0
        while going:
            groups: dict[tuple[int, int], list[_Job]] = defaultdict(list)
            for job in going:
                seen = len(self._seen(job))
                groups[seen, min(limit - len(job.ids) + job.n_given, self._room(seen))].append(job)
            going = []
            for (_, room), members in sorted(groups.items()):
                for at in range(0, len(members), MOST):
                    for job in self._longer(members[at : at + MOST], room, sampling, (seed, part), see):
                        if job.finished or len(job.ids) - job.n_given >= limit:
                            done[job.number, job.sample] = job
                        else:
                            going.append(job)
            part += 1
        return [done[job.number, job.sample] for job in jobs]

    def _seen(self, job: _Job) -> tuple[int, ...]:
        """What the model goes on from: all of the text, or its last half context where it fills the context."""
        return job.ids if len(job.ids) <= self.context else job.ids[-(self.context // 2) :]

    def _room(self, n_seen: int) -> int:
        """Tokens that can come behind so many: the last one is written, and never read."""
        return self.context + 1 - n_seen

    def _longer(
        self, jobs: Sequence[_Job], room: int, sampling: Sampling, seed: tuple[int, int], see: See | None
    ) -> list[_Job]:
        """Jobs of one length, each by at most `room` tokens longer."""
        known = torch.tensor([self._seen(job) for job in jobs], device=self.device)

        def watch(places: list[int], tokens: list[list[int]]) -> None:
            if see is not None and jobs[0].number == jobs[0].sample == places[0] == 0 and tokens[0][0] != PAD:
                see(tokens[0][0])

        found = sample(
            self.model,
            known[:, :-1],
            first=known[:, -1],
            max_length=room,
            seeds=[(*seed, job.number, job.sample) for job in jobs],
            sampling=sampling,
            watch=None if see is None else watch,
        )
        return [_extended(job, hypothesis) for job, (hypothesis,) in zip(jobs, found, strict=True)]

    def _generation(self, prompt: str, job: _Job) -> Generation:
        ids = job.ids[job.n_given :]
        return Generation(prompt, self.tokenizer.decode(ids), ids, job.log_prob, job.finished)

    # -- scoring

    def _log_probs(self, rows: Sequence[np.ndarray], batch_tokens: int | None) -> list[list[float]]:
        """Of each row, nats of every token but the first, given those before it."""
        budget = batch_tokens or self.settings.decoding.batch_tokens
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]), reverse=True)
        found: list[list[float]] = [[] for _ in rows]
        while order:
            n = max(1, budget // max(1, len(rows[order[0]]) - 1))
            batch, order = order[:n], order[n:]
            examples = [RowExample(rows[i][:-1], rows[i][1:]) for i in batch]
            tensors = collate_rows(examples, separate=self.settings.data.separate_documents).to(self.device)
            known = token_log_probs(self.model, tensors.inputs, tensors.targets).tolist()
            for i, row in zip(batch, known, strict=True):
                found[i] = row[: len(rows[i]) - 1]
        return found


def _extended(job: _Job, hypothesis: Hypothesis) -> _Job:
    return replace(
        job,
        ids=job.ids + hypothesis.ids,
        log_prob=job.log_prob + hypothesis.log_prob,
        finished=hypothesis.finished,
    )
