"""Causal language modelling (GPT)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from transduce.config.decoding import OF_SEARCH, DecodingOptions, DecodingSettings
from transduce.config.kinds import resolve_preset
from transduce.config.model import AttentionSettings, ModelSettings
from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.data.encoding import encode_text
from transduce.data.store import TextStore
from transduce.data.text import Piece, read_pieces
from transduce.decoding.generator import Generator
from transduce.decoding.results import TextScore
from transduce.errors import SettingsError
from transduce.evaluation.options import TextEvaluation
from transduce.evaluation.result_files import Wording, save_generated, save_set
from transduce.evaluation.scored_models import ScoredText
from transduce.logging import Log
from transduce.runs.folder import RunFolder
from transduce.tasks.base import Prepared, Validation
from transduce.tasks.defaults import (
    MODEL,
    PRE_NORM,
    TRAINING,
    UNSMOOTHED,
    Answer,
    Defaults,
    Facts,
    Size,
    choose_context,
    learning_rate,
)
from transduce.tasks.monolingual import PlainTextTask
from transduce.text.special import BOS, EOS, Vocabulary
from transduce.training.loss import Criterion, predict_tokens, predict_tokens_with_carry
from transduce.training.text_feed import RowFeeder, StreamFeeder

N_SAMPLES = 6  # texts that the report shows


def _rotary(facts: Facts) -> Answer:
    model = resolve_preset(facts.settings.model)
    if not isinstance(model, AttentionSettings) or model.key_width % 2:
        return None
    return "rotary", "relative positions are learned faster than absolute ones"


def _batch_of_rows(facts: Facts) -> Answer:
    context, n_rows = facts.settings.data.context or facts.size.context[facts.on_gpu], facts.size.batch[facts.on_gpu]
    return context * n_rows, f"{n_rows} rows of {context} tokens per update"


CAUSAL = Defaults(
    tuple(
        Size(most=n, tokenizer=kind, vocab_size=vocab_size, preset=preset, dropout=dropout, context=context,
             batch=n_rows, epochs=epochs, minutes=minutes)
        for n, kind, vocab_size, preset, dropout, context, n_rows, epochs, minutes in (
            (3e5, "char", 512, ("gpt-tiny", "gpt-tiny"), 0.2, (64, 64), (16, 32), 60, (5, 3)),
            (2e6, "char", 512, ("gpt-tiny", "gpt-small"), 0.1, (128, 256), (32, 64), 30, (20, 10)),
            (2e7, "bpe", 2_000, ("gpt-tiny", "gpt-small"), 0.1, (128, 256), (32, 64), 10, (60, 30)),
            (2e8, "bpe", 8_000, ("gpt-small", "gpt-small"), 0.1, (256, 512), (32, 64), 4, (360, 120)),
            (math.inf, "bpe", 16_000, ("gpt-small", "gpt2"), 0.0, (256, 1024), (32, 64), 2, (1440, 1440)),
        )
    ),
    {
        "tokenizer.exact": (True, "text is reproduced exactly, with line ends and rare characters"),
        "tokenizer.normalization": ("identity", "required by tokenizer.exact"),
        "tokenizer.kind": lambda facts: (facts.size.tokenizer, f"for {facts.text}"),
        **MODEL,
        "model.residual": PRE_NORM,
        "model.positions": _rotary,
        "model.activation": ("gelu", "GPT's"),
        "data.context": choose_context,
        "model.segment_length": lambda facts: (facts.settings.data.context, "data.context"),
    },
    {
        **TRAINING,
        "training.label_smoothing": UNSMOOTHED,
        "training.batch_tokens": _batch_of_rows,
        "training.lr": learning_rate(0.384),  # 0.003 at width 128
        "training.matrix_lr": learning_rate(0.768, only="muon"),
    },
)  # fmt: skip


_DECODING = tuple(f"decoding.{key}" for key in DecodingSettings.model_fields if key not in OF_SEARCH)


class CausalTask(PlainTextTask[TextStore]):
    """Trains a language model on plain text; evaluated by the loss on held-out text."""

    name = "causal"
    wording = Wording(
        title="A language model that continues text",
        does="continues text",
        command="transduce generate THIS_FOLDER < prompt.txt",
        python="Generator.load(FOLDER).generate([{example}])[0].text",
        samples="Texts",
        shape="language model, {tokenizer} tokens · {model}, context {context}",
        limits=("It sees {context} tokens at once{memory}.", "It writes likely text, which need not be true."),
    )
    scored_model = ScoredText
    inherited = ("data.context", *_DECODING)
    defaults = CAUSAL
    store = TextStore
    uses = frozenset(
        {
            *(f"data.{key}" for key in ("documents", "context", "separate_documents")),
            "tokenizer.exact",
            *_DECODING,
        }
    )

    def check(self, settings: Settings, model: ModelSettings) -> None:
        super().check(settings, model)
        own, context, batch = settings.tokenizer, settings.data.context, settings.training.batch_tokens
        if settings.training.start is None:  # else its vocabulary is exact already
            for key, needed in (("exact", True), ("normalization", "identity")):
                if key in own.model_fields_set and (value := getattr(own, key)) != needed:
                    shown = json.dumps(value)
                    raise SettingsError(f"tokenizer.{key} = {shown}: task 'causal' needs exact text; leave it out")
        if settings.data.separate_documents and not model.separates_documents:
            raise SettingsError(
                "data.separate_documents = true: this model reads beyond the start of a document; use a Transformer "
                "without model.feed_forward = 'conv'"
            )
        if context not in (None, model.own_context or context):
            raise SettingsError(
                f"model.segment_length = {model.own_context}: differs from data.context = {context}; set one of them"
            )
        if context is not None and batch is not None and batch < context:
            raise SettingsError(
                f"training.batch_tokens = {batch}: must be at least data.context = {context}, the tokens of a row"
            )

    def encode_set(
        self, folder: Path, records: Iterable[Piece], vocabulary: Vocabulary, settings: Settings, *, name: str
    ) -> TextStore:
        return encode_text(folder, records, vocabulary, name=name)

    def describe(self, store: TextStore, settings: Settings) -> dict[str, Any]:
        return {"documents": store.facts["documents"], "bytes": store.n_bytes, "tokens": store.n_tokens}

    def criterion(self, settings: Settings) -> Criterion:
        return predict_tokens_with_carry if settings.model.carries_state else predict_tokens

    def feeder(self, prepared: Prepared[TextStore], settings: Settings, device: torch.device) -> RowFeeder:
        return _feeder(prepared.train, settings, device)

    def longest_rows(self, prepared: Prepared[TextStore], settings: Settings) -> Prepared[TextStore]:
        return prepared

    def validation(self, prepared: Prepared[TextStore], settings: Settings, device: torch.device) -> Validation:
        memory = settings.model.remembered
        return Validation(
            _feeder(prepared.valid, settings, device).in_order,
            n_bytes=prepared.valid.n_bytes,
            criterion=predict_tokens if memory is None else partial(predict_tokens_with_carry, memory_length=memory),
            in_order=memory is not None,
        )

    def finish(self, folder: RunFolder, *, update: int, log: Log) -> None:
        generator = Generator.load(folder.path, device=folder.settings.training.device)
        stores = dict(self.held_out_stores(folder))
        for name, store in stores.items():
            score = generator.evaluate(store)
            save_set(folder, "text_scores", name, score.to_json())
            log.say(f"{name}: {score.lines()[0]}")
        options = DecodingOptions(sample=True, temperature=0.8)
        found = generator.generate(_beginnings(stores["valid"], generator), options, cut_prompt=True)
        save_generated(folder, "temperature 0.8", [(one.prompt, one.text) for one in found], update=update)

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
    """Prompts: a few short pieces of held-out text, and an empty one."""
    n, length = N_SAMPLES - 1, max(1, min(16, generator.context // 4))
    prompts = []
    for i in range(n):
        start = len(store) * i // n
        ids = store.ids[start : start + length].tolist()
        prompts.append(generator.tokenizer.decode([j for j in ids if j not in (BOS, EOS)]))
    return [*dict.fromkeys(filter(None, prompts)), ""]
