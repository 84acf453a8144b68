"""Prompts in, continued text out: `Generator`, for runs of task "causal"."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Unpack

import numpy as np

from transduce.config.decoding import DecodingKeywords, DecodingOptions
from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.data.store import RowExample, TextStore
from transduce.decoding.engine import DecodingInput, Engine, Hypothesis
from transduce.decoding.open_run import GIVEN, AnyPrecision, EngineChoice, EngineModel, open_engine
from transduce.decoding.results import Generation, TextLogProbs, TextScore
from transduce.errors import DataError, SettingsError
from transduce.text.hub import HubTokenizer
from transduce.text.special import BOS, EOS
from transduce.text.tokenizer import Tokenizer

SCORED_ROWS = 256  # rows of running text scored at once

_DEFAULT = DecodingOptions(sample=True)


@dataclass(frozen=True, slots=True)
class Continuation:
    """A text in progress.

    `key`: indices of its prompt and of its sample. `ids`: all tokens so far, of which the first `n_given` are the
    prompt's. `limit`: maximum number of new tokens. `part`: number of contexts that the text has filled. `log_prob`:
    sum over the new tokens. `finished`: whether the text has ended.
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
        """Append the engine's output for `Generator.next_input`."""
        log_prob = self.log_prob + new.log_prob
        return replace(self, ids=self.ids + new.ids, part=self.part + 1, log_prob=log_prob, finished=new.finished)


class Generator(EngineModel):
    """A language model with its vocabulary. Safe to use from several threads.

    >>> generator = Generator.load("runs/x")                          # doctest: +SKIP
    >>> generator.generate(["ROMEO:"], temperature=0.8)[0].text       # doctest: +SKIP
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
        """Wrap an engine such as `TorchEngine(model)`, for a decoder-only model in eval mode.

        `settings`: settings of the run. `choice`: the engine's precision, and the reason if it is slow.
        """
        super().__init__(engine, choice)
        self.tokenizer, self.settings = tokenizer, settings
        self.context = resolved(settings.data.context, "data.context")
        self.memory = settings.model.remembered
        """Number of tokens before the current `context` tokens that the model remembers; None without a memory."""
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
        """Load a run; see `Translator.load`. `memory`: tokens that a model with a memory keeps (default: the run's)."""
        (folder,), tokenizers, engine, choice = open_engine(
            path, task=cls.task, device=device, precision=precision, memory=memory
        )
        assert isinstance(tokenizers.tgt, Tokenizer | HubTokenizer), "a language model has one of these"
        return cls(engine, tokenizers.tgt, folder.settings, choice=choice)

    def generate(
        self,
        prompts: Sequence[str],
        options: DecodingOptions = _DEFAULT,
        *,
        cut_prompt: bool = False,
        **decoding: Unpack[DecodingKeywords],
    ) -> list[Generation]:
        """Continue each prompt: `n_best` samples per prompt, in order.

        A sample is a function of the model, the prompt, its position, the seed and the options; other prompts do not
        change it. A text that outgrows the model's context is continued from its last `context // 2` tokens, unless
        the model has a memory.

        `decoding`: decoding options as keywords, such as `temperature=0.8`, which replace those of `options`; see
        `DecodingOptions`. `cut_prompt`: cut off the beginning of a prompt that is longer than the model's context.

        Raises:
            DataError: A prompt is longer than the context, and `cut_prompt` is not set.
            SettingsError: An option is unknown or out of bounds, or asks for a search.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts must be a list of texts, not one text: generate([text])")
        options = options.with_values(**decoding)
        return [
            Generation(
                prompts[text.key[0]], self.tokenizer.decode(text.new_ids), text.new_ids, text.log_prob, text.finished
            )
            for text in self._run(self.start(prompts, options, cut_prompt=cut_prompt), options)
        ]

    def start(self, prompts: Sequence[str], options: DecodingOptions, *, cut_prompt: bool) -> list[Continuation]:
        """Encode the prompts as texts without new tokens. Raises the errors of `generate`."""
        limit, samples = self.options_of_a_text(options).max_length, range(options.n_best)
        encoded = [self._prompt(text, number, cut_prompt=cut_prompt) for number, text in enumerate(prompts)]
        return [Continuation((n, i), ids, len(ids), limit) for n, ids in enumerate(encoded) for i in samples]

    def options_of_a_text(self, options: DecodingOptions) -> DecodingOptions:
        """Return the decoding options for continuing a single text. Raises `SettingsError` if they ask for a search."""
        given = options.model_dump(exclude_unset=True) | {"sample": True, "n_best": 1}
        return DecodingOptions(**given).over(self.settings.decoding)

    def next_input(self, text: Continuation) -> DecodingInput | None:
        """Return the engine's next input for continuing a text; None if the text is complete.

        The input is the whole text or, if the text exceeds the context, its last `context // 2` tokens.
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

        A text longer than the context is scored in parts, each without the part before it, unless the model has a
        memory.
        """
        rows, owners = list[np.ndarray](), list[int]()
        for number, ids in enumerate(self.tokenizer.encode_batch(texts)):
            framed = np.array([BOS, *ids, EOS], dtype=np.int64)
            length = self.context if self.memory is None else len(framed)
            for start in range(1, len(framed), length):
                rows.append(framed[start - 1 : start + length])
                owners.append(number)
        log_probs: list[list[float]] = [[] for _ in texts]
        for number, part in zip(owners, self._log_probs(rows, self.settings.decoding.batch_tokens), strict=True):
            log_probs[number] += part
        return [TextLogProbs(tuple(values)) for values in log_probs]

    def token_log_probs(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        """Log-probability of each token that `generate` wrote after `prompt`, in the contexts used for writing."""
        known, values = [*prompt, *ids], list[float]()
        while (done := len(prompt) + len(values)) < len(known):
            cut = self.memory is None and done > self.context
            start = done - self.context // 2 if cut else 0
            row = known[start:] if self.memory is not None else known[start : start + self.context + 1]
            (row_values,) = self._log_probs([np.array(row, dtype=np.int64)], len(row))
            values += row_values[done - start - 1 :]
        return values

    def evaluate(self, store: TextStore, *, stride: int | None = None, batch_tokens: int | None = None) -> TextScore:
        """Score running text, every token once, in rows of the context's length.

        With `stride` below the context, rows overlap: each token is predicted from at least context - stride tokens
        before it, at more cost. A model with a memory reads the text as one row.
        """
        if self.memory is not None:
            for name, value in (("stride", stride), ("batch_tokens", batch_tokens)):
                if value is not None:
                    raise SettingsError(
                        f"{name} = {value}: this model has a memory and reads the text as one row; leave it out"
                    )
        stride = self.context if stride is None else stride
        if not 1 <= stride <= self.context:
            raise SettingsError(f"stride = {stride}: must be from 1 to the context, {self.context}")
        nats, n_tokens = 0.0, 0
        budget = max(self.context, batch_tokens or self.settings.decoding.batch_tokens)
        remaining = self._rows(store.ids, stride)
        while batch := list(islice(remaining, SCORED_ROWS)):
            for (row, skip), log_probs in zip(batch, self._log_probs([row for row, _ in batch], budget), strict=True):
                real = row[1 + skip :] != BOS
                nats -= float(np.asarray(log_probs[skip:])[real].sum())
                n_tokens += int(real.sum())
        return TextScore(
            nats=nats,
            n_tokens=n_tokens,
            n_bytes=store.n_bytes,
            context=self.context,
            stride=stride,
            memory=self.memory,
        )

    def _rows(self, ids: np.ndarray, stride: int) -> Iterator[tuple[np.ndarray, int]]:
        """Yield rows of running text, each with the number of its first targets, which an earlier row has scored."""
        if self.memory is not None:  # the memory carries over from part to part
            yield np.asarray(ids, dtype=np.int64), 0
            return
        for start in range(1, len(ids), stride):
            first = max(1, start + stride - self.context)
            yield np.asarray(ids[first - 1 : start + stride], dtype=np.int64), start - first

    def _prompt(self, text: str, number: int, *, cut_prompt: bool) -> tuple[int, ...]:
        """Encode prompt `number` (from 0). BOS begins empty prompts, and all prompts if training documents have it."""
        ids = self.tokenizer.encode(text)
        ids = [BOS, *ids] if self._begins or not ids else ids
        if len(ids) > self.context and self.memory is None:
            if not cut_prompt:
                raise DataError(
                    f"prompt {number + 1} has {len(ids)} tokens; the context of this model is {self.context}; shorten "
                    "it, or cut its beginning off with cut_prompt",
                    "cut_prompt",
                )
            ids = ids[-self.context :]
        return tuple(ids)

    def _run(self, texts: list[Continuation], options: DecodingOptions) -> list[Continuation]:
        """Complete all texts in rounds; each round fills the context of every text."""
        options = self.options_of_a_text(options)
        while inputs := {i: prompt for i, text in enumerate(texts) if (prompt := self.next_input(text)) is not None}:
            outputs = self.engine.translate(list(inputs.values()), options)
            for index, (new,) in zip(inputs, outputs, strict=True):
                texts[index] = texts[index].extended(new)
        return texts

    def _log_probs(self, rows: Sequence[np.ndarray], batch_tokens: int) -> list[list[float]]:
        """Log-probability of every token of each row except the first, given the tokens before it."""
        examples = [RowExample(row[:-1], row[1:]) for row in rows]
        return self.engine.score_rows(
            examples, separate=self.settings.data.separate_documents, batch_tokens=batch_tokens
        )


class IncrementalDetokenizer:
    """Turns tokens into parts of text that never end within a character and never show a part of a stop string.

    Attributes:
        ids: The tokens, up to the one that completed a stop string.
        is_stopped: Whether a stop string was found; the text ends before it.
    """

    def __init__(self, tokenizer: Tokenizer | HubTokenizer, stop: Sequence[str] = ()) -> None:
        """Start an empty text that ends before the first of the strings `stop`."""
        self.ids: list[int] = []
        self.is_stopped = False
        self._bytes_of, self._stop = tokenizer.bytes_of, tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # may be the start of a stop string

    def add(self, tokens: Iterable[int]) -> str:
        """Append tokens; return the further text that no later token can change."""
        parts: list[str] = []
        for token in tokens:
            if self.is_stopped:
                break
            self.ids.append(token)
            parts.append(self._certain(self._decoder.decode(self._bytes_of[token])))
        return "".join(parts)

    def end(self) -> str:
        """Return the rest of the text. Call this after the last token."""
        return "" if self.is_stopped else self._certain(self._decoder.decode(b"", final=True), is_last=True)

    def _certain(self, new: str, *, is_last: bool = False) -> str:
        text = self._held + new
        stops = [start for string in self._stop if (start := text.find(string)) >= 0]
        self.is_stopped = bool(stops)
        end = min(stops) if stops else len(text) if is_last else len(text) - self._n_uncertain(text)
        self._held = text[end:]
        return text[:end]

    def _n_uncertain(self, text: str) -> int:
        """Number of characters at the end of a text that may begin a stop string."""
        lengths = (n for stop in self._stop for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n]))
        return max(lengths, default=0)
