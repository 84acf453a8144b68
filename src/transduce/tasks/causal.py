"""The task causal: causal language modelling (GPT)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from transduce.config.decoding import DecodingOptions
from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.data.encoding import encode_text
from transduce.data.preparation import Texts
from transduce.data.reading import Piece, read_pieces
from transduce.data.store import TextStore
from transduce.decoding.generator import Generator
from transduce.decoding.results import TextScore
from transduce.evaluation.run_record import save_generated, save_set
from transduce.logging import Log
from transduce.runs.folder import RunFolder
from transduce.tasks.base import PLAIN, Prepared, Task, ToDraw, held_out_stores, prepare_sets
from transduce.text.special import BOS, EOS
from transduce.text.tokenizer import Tokenizers
from transduce.training.feed import RowFeeder, StreamFeeder
from transduce.training.loss import Criterion, predict_tokens, predict_tokens_with_carry
from transduce.training.validate import Validator

N_SAMPLES = 6  # texts that the report shows


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEvaluation:
    """Options of the evaluation of a language model on a text; `Generator.evaluate` explains them."""

    text: Path
    stride: int | None = None
    memory: int | None = None
    batch_tokens: int | None = None


class CausalTask(Task[Texts[Piece], TextStore]):
    """Trains a language model on plain text; evaluated by the loss on held-out text."""

    name = "causal"
    form = PLAIN
    store = TextStore
    evaluation = TextEvaluation

    def prepare(self, folder: RunFolder, texts: Texts[Piece], tokenizers: Tokenizers, log: Log) -> Prepared[TextStore]:
        def encode(path: Path, records: Iterable[Piece], name: str) -> TextStore:
            return encode_text(path, records, tokenizers.tgt, name=f"{name} text")

        def describe(store: TextStore) -> dict[str, Any]:
            return {"documents": store.facts["documents"], "bytes": store.n_bytes, "tokens": store.n_tokens}

        return prepare_sets(self, folder, texts, tokenizers, log, encode=encode, describe=describe)

    def loss(self, settings: Settings) -> Criterion:
        return predict_tokens_with_carry if settings.model.carries_state else predict_tokens

    def batches(self, prepared: Prepared[TextStore], settings: Settings, device: torch.device) -> RowFeeder:
        return _feeder(prepared.train, settings, device)

    def validate(
        self, model: nn.Module, prepared: Prepared[TextStore], settings: Settings, device: torch.device
    ) -> Validator:
        memory, training = settings.model.remembered, settings.training
        return Validator(
            model,
            _feeder(prepared.valid, settings, device).in_order,
            smoothing=training.label_smoothing,
            precision=training.precision,
            n_bytes=prepared.valid.n_bytes,
            criterion=predict_tokens if memory is None else partial(predict_tokens_with_carry, memory_length=memory),
            in_order=memory is not None,
        )

    def finish(self, folder: RunFolder, *, update: int, log: Log) -> ToDraw:
        generator = Generator.load(folder.path, device=folder.settings.training.device)
        stores = dict(held_out_stores(folder, self.store))
        for name, store in stores.items():
            score = generator.evaluate(store)
            save_set(folder, "text_scores", name, score.to_json())
            log.say(f"{name}: {score.lines()[0]}")
        options = DecodingOptions(sample=True, temperature=0.8)
        texts = generator.generate(_beginnings(stores["valid"], generator), options, cut_prompt=True)
        save_generated(folder, "temperature 0.8", [(text.prompt, text.text) for text in texts], update=update)
        return ()

    def evaluate(self, run: Path, options: TextEvaluation, *, device: str = "auto") -> TextScore:
        generator = Generator.load(run, device=device, memory=options.memory)
        pieces = read_pieces(options.text, generator.settings.data.documents)
        store = encode_text(None, pieces, generator.tokenizer, name=str(options.text))
        return generator.evaluate(store, stride=options.stride, batch_tokens=options.batch_tokens)


def _feeder(store: TextStore, settings: Settings, device: torch.device) -> RowFeeder:
    data = settings.data
    feeder = StreamFeeder if settings.model.carries_state else RowFeeder
    return feeder(
        store,
        settings.training,
        device=device,
        context=resolved(data.context, "data.context"),
        separate=data.separate_documents,
    )


def _beginnings(store: TextStore, generator: Generator) -> list[str]:
    """Return prompts for samples: a few short extracts of held-out text, and an empty prompt."""
    n, length = N_SAMPLES - 1, max(1, min(16, generator.context // 4))
    prompts = []
    for i in range(n):
        start = len(store) * i // n
        ids = store.ids[start : start + length].tolist()
        prompts.append(generator.tokenizer.decode([j for j in ids if j not in (BOS, EOS)]))
    return [*dict.fromkeys(filter(None, prompts)), ""]
