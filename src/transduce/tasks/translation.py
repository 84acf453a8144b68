"""Translation of sentence pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from transduce.config import (
    DecodingSettings,
    EvaluationSettings,
    ModelSettings,
    Settings,
    TransformerSettings,
    resolved,
)
from transduce.data import preparation
from transduce.data.batch import Batch, Example, collate
from transduce.data.batching import plan
from transduce.data.corpus import Pair
from transduce.data.preparation import Prepared, Texts
from transduce.data.sources import Sources
from transduce.data.store import TokenStore
from transduce.decoding.translator import Translator
from transduce.errors import SettingsError
from transduce.evaluation.finalize import finalize_translation
from transduce.evaluation.metrics import evaluate, metrics
from transduce.evaluation.records import Wording, shape_line
from transduce.logging import Log
from transduce.machine import Machine
from transduce.runs.folder import RunFolder
from transduce.tasks.base import Task
from transduce.tasks.choices import Facts
from transduce.tasks.defaults import TRANSLATION
from transduce.tasks.worst_batch import n_rows_of, tiled
from transduce.text.tokenizer import Tokenizers
from transduce.training.feed import PairFeeder, SubwordSampling
from transduce.training.validate import Judge, Validator


class TranslationTask(Task[Texts, Prepared]):
    """Trains a translator on sentence pairs; evaluated by BLEU and chrF."""

    name = "translation"
    wording = Wording(
        title="A translator from `{src}` to `{tgt}`",
        does="translates text",
        command="transduce translate THIS_FOLDER < in.txt > out.txt",
        python=(
            "from transduce import Translator\n\n"
            'translator = Translator.load("THIS_FOLDER")\nprint(translator.translate(["..."])[0].text)'
        ),
        samples="Translations",
        shape=lambda record: (
            f"{record.settings.data.src_lang} to {record.settings.data.tgt_lang} · {shape_line(record)}"
        ),
        limits=lambda record: (
            "It translates sentence by sentence and does not see the context.",
            f"It was trained on sentences of up to {record.settings.data.max_length} tokens and writes up to "
            f"{record.settings.decoding.max_length}.",
        ),
    )
    evaluated_on = "--src"
    evaluate_options = frozenset(
        {
            *("--ref", "--hyp", "--against", "--tokenize", "--lowercase or --cased", "--output"),
            *("--beam", "--max-length", "--length-penalty", "--batch-tokens"),
        }
    )
    inherited = (
        *("data.src_lang", "data.tgt_lang"),
        *(f"decoding.{key}" for key in DecodingSettings.model_fields),
    )
    reads = "pairs"
    defaults = TRANSLATION
    uses = frozenset(
        {
            *(
                f"data.{key}"
                for key in ("src_lang", "tgt_lang", "max_length", "max_ratio", "deduplicate", "drop_copies")
            ),
            *(f"tokenizer.{key}" for key in ("joint", "sampling", "exact")),
            "training.valid_bleu_sentences",
            *(f"decoding.{key}" for key in DecodingSettings.model_fields),
            *(f"evaluation.{key}" for key in EvaluationSettings.model_fields),
        }
    )

    def check(self, settings: Settings, model: ModelSettings) -> None:
        """Refuse tokenizers, metrics and lengths that do not fit."""
        assert isinstance(model, TransformerSettings)
        if not settings.tokenizer.joint and model.tie == "three_way" and "tie" in settings.model.model_fields_set:
            raise SettingsError(
                "model.tie = 'three_way' needs one vocabulary: set tokenizer.joint = true, or model.tie = 'two_way'"
            )
        if settings.tokenizer.exact:
            raise SettingsError("tokenizer.exact = true: only for running text; leave it out")
        metrics(settings.evaluation.tokenize, settings.evaluation.lowercase)
        longest = max(settings.data.max_length, settings.decoding.max_length) + 1
        if model.positions == "learned" and model.max_positions < longest:
            raise SettingsError(
                f"model.max_positions = {model.max_positions}: must be at least {longest}: one more than "
                "data.max_length and decoding.max_length"
            )

    def sources(self, settings: Settings) -> Sources[Pair]:
        """Sentence pairs."""
        return preparation.sources_of(settings)

    def read(
        self, settings: Settings, log: Log, sources: Sources[Pair] | None = None, *, spool_in: Path | None = None
    ) -> Texts:
        """Sentence pairs."""
        texts = preparation.read_texts(settings, log, sources, spool_in=spool_in)
        log.say(f"{texts.n_pairs:,} sentence pairs to train on, {len(texts.valid.pairs):,} to validate on")
        return texts

    def facts(self, asked: Settings, texts: Texts, machine: Machine) -> Facts:
        """The number of pairs."""
        return Facts(asked, asked, machine, self.defaults, texts.n_pairs)

    def lines(self, texts: Texts, settings: Settings) -> tuple[Iterator[str], Iterator[str]]:
        """A sample of the cleaned text of both sides."""
        return preparation.lines_of(texts)

    def count_tokens(self, texts: Texts, tokenizers: Tokenizers, settings: Settings) -> int:
        """Tokens of the longer side of all pairs."""
        return preparation.count_tokens(texts, tokenizers)

    def encode(self, folder: RunFolder, texts: Texts, tokenizers: Tokenizers, settings: Settings, log: Log) -> Prepared:
        """Clean and encode the pairs, and check for held-out text in the training text."""
        return preparation.encode(folder, texts, tokenizers, settings, log)

    def open_prepared(self, folder: RunFolder) -> Prepared:
        """Both stores, and the validation sentences to translate."""
        return preparation.open_prepared(folder)

    def fingerprint(self, settings: Settings, tokenizers: Tokenizers, digests: Sequence[bytes]) -> str:
        """Of files, cleaning and vocabulary."""
        return preparation.fingerprint(settings, tokenizers, digests)

    def feeder(self, prepared: Prepared, settings: Settings, device: torch.device) -> PairFeeder:
        """Batches of pairs of similar length."""
        training, amount = settings.training, settings.tokenizer.sampling
        segment = None
        if amount:
            segment = SubwordSampling(prepared.tokenizers, amount, training.seed, settings.data.max_length)
        return PairFeeder(prepared.train, training, device=device, weights=prepared.weights, segment=segment)

    def longest(self, prepared: Prepared, settings: Settings) -> Prepared:
        """Pairs whose sides both have the maximum length."""
        length = settings.data.max_length
        n = n_rows_of(length, settings)
        sides = [tiled(side.ids, length).tolist() for side in (prepared.train.src, prepared.train.tgt)]
        return replace(prepared, train=TokenStore.from_lists([sides[0]] * n, [sides[1]] * n), weights=None)

    def validator(self, model: nn.Module, prepared: Prepared, settings: Settings, device: torch.device) -> Validator:
        """The loss on all held-out pairs, and BLEU and chrF on some."""
        training = settings.training
        budget = training.micro_batch_tokens or resolved(training.batch_tokens, "training.batch_tokens")
        return Validator(
            model,
            lambda: _batches(prepared.valid, budget, device),
            smoothing=training.label_smoothing,
            judge=_judge(model, prepared, settings) if prepared.judged else None,
            precision=training.precision,
        )

    def tokenizers(self, prepared: Prepared) -> Tokenizers:
        """Those of both sides."""
        return prepared.tokenizers

    def finish(self, folder: RunFolder, *, update: int, log: Log) -> None:
        """Score the test sets, capture attention, write the report."""
        finalize_translation(folder, preparation.read_judged(folder), self.wording, update=update, log=log)


def _batches(store: TokenStore, budget: int, device: torch.device) -> Iterator[Batch]:
    """All pairs of a store, each once."""
    for indices in plan(store.src_lengths, store.tgt_lengths, budget=budget, seed=0, epoch=0):
        yield collate([Example(*store[int(i)]) for i in indices]).to(device)


def _judge(model: nn.Module, prepared: Prepared, settings: Settings) -> Judge:
    """Translates some held-out sentences with the decoding settings and scores the translations."""
    sources, references = map(list, zip(*prepared.judged, strict=True))
    scoring = settings.evaluation
    translator = Translator(model, prepared.tokenizers, settings.decoding)  # its threads are reused by all validations

    def judge(model: nn.Module) -> dict[str, float]:
        assert model is translator.model, "a validator scores one model"
        hypotheses = [translation.text for translation in translator.translate(sources)]
        scores = evaluate(hypotheses, references, tokenize=scoring.tokenize, lowercase=scoring.lowercase)
        return {"bleu": scores.bleu.value, "chrf": scores.chrf.value}

    return judge
