"""Masked language modelling, with next-sentence prediction as an option (BERT)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from torch import nn

from transduce.config import BertSettings, ModelSettings, Settings, resolved
from transduce.data.arrays import check_lengths, read_names
from transduce.data.encoding import encode_sentences
from transduce.data.store import SentenceStore
from transduce.data.text import Piece
from transduce.decoding.mask_filler import MaskFiller, judges_pairs, masked_feeder, masked_judge
from transduce.errors import DataError, SettingsError
from transduce.evaluation.finalize import finalize
from transduce.evaluation.records import Wording, save_generated, save_set, shape_line
from transduce.logging import Log
from transduce.runs.folder import RunFolder
from transduce.tasks import plain_text
from transduce.tasks.defaults import MASKED
from transduce.tasks.plain_text import PlainTexts, PlainTextTask, PreparedStores
from transduce.tasks.worst_batch import n_rows_of, tiled
from transduce.text.special import MASK_PIECE, Vocabulary
from transduce.text.tokenizer import Tokenizers
from transduce.training.encoder_feed import MaskedFeeder
from transduce.training.loss import predict_masked_tokens
from transduce.training.validate import Validator

N_SAMPLES, SAMPLE_TOKENS = 8, 40


PreparedSentences = PreparedStores[SentenceStore]


class MaskedTask(PlainTextTask[PreparedSentences]):
    """Trains a masked language model on plain text, whose lines are sentences."""

    name = "masked"
    wording = Wording(
        title="A masked language model",
        does="predicts masked words",
        command='transduce fill THIS_FOLDER "The capital of France is <mask>."',
        python=(
            "from transduce import MaskFiller\n\n"
            'filler = MaskFiller.load("THIS_FOLDER")\nprint(filler.fill(["A <mask> runs."])[0].masks[0])'
        ),
        samples="Masked words",
        shape=lambda record: f"masked language model · {shape_line(record)}",
        limits=lambda record: (f"It sees {record.settings.data.context} tokens at once.",),
    )
    evaluated_on = "--text"
    evaluate_options = frozenset({"--batch-tokens"})
    inherited = ("data.documents",)
    reads = "text"
    defaults = MASKED
    uses = frozenset(
        {
            *(f"data.{key}" for key in ("documents", "context", "masked", "whole_words")),
            *("tokenizer.mask", "tokenizer.exact"),
        }
    )
    criterion = staticmethod(predict_masked_tokens)

    def check(self, settings: Settings, model: ModelSettings) -> None:
        """Refuse data settings of other tasks, vocabularies without <mask>, and impossible pairs."""
        assert isinstance(model, BertSettings)
        plain_text.check_files(settings)
        context = settings.data.context
        own = settings.tokenizer
        if "mask" in own.model_fields_set and not own.mask and settings.training.start is None:
            raise SettingsError("tokenizer.mask = false: task 'masked' needs a piece <mask>; leave it out")
        if model.next_sentence and settings.data.documents == "line":
            raise SettingsError(
                "model.next_sentence = true with data.documents = 'line': one sentence has no next sentence; "
                "use 'file' or 'blank_line'"
            )
        if model.next_sentence and model.n_segments == 1:
            raise SettingsError("model.next_sentence = true: model.n_segments must be 2, or 0 for none")
        if context is not None and context < 8:
            raise SettingsError(f"data.context = {context}: must be at least 8")
        if context is not None and model.positions == "learned" and context > model.max_positions:
            raise SettingsError(
                f"data.context = {context}: more than model.max_positions = {model.max_positions} learned positions; "
                "lower the first or raise the second"
            )

    def check_texts(self, texts: PlainTexts, settings: Settings) -> None:
        """Next-sentence prediction needs two documents in every part."""
        if judges_pairs(settings):
            for name, part in texts.parts.items():
                _check_documents(name, sum(1 for _ in islice(_documents(part.stream()), 2)))

    def encode(
        self, folder: RunFolder, texts: PlainTexts, tokenizers: Tokenizers, settings: Settings, log: Log
    ) -> PreparedSentences:
        """One store of sentences for each set."""
        tokens, vocabulary = folder.path / "tokens", tokenizers.tgt
        context = resolved(settings.data.context, "data.context")
        tokens.mkdir(exist_ok=True)
        mark, described, checks = self.fingerprint(settings, tokenizers, texts.digests), [], texts.checks()
        stores = dict[str, SentenceStore]()
        for at, part in texts.parts.items():
            train, name = part is texts.train, at if at in ("train", "valid") else part.name
            store = stores[at] = encode_sentences(
                tokens / at,
                plain_text.watched(part.stream(), checks) if train else part.stream(),
                vocabulary,
                longest=context - 3,
                fingerprint=mark if train else "",
                name=f"{name} text",
            )
            _check_rows(store, name, vocabulary, settings)
            numbers = {"documents": store.n_documents, "bytes": store.facts["bytes"], "tokens": len(store.ids)}
            described.append({"name": name, "files": part.files, **numbers})
        plain_text.write_records(folder, texts, tokenizers, {"fingerprint": mark, "sets": described}, checks, log)
        return PreparedSentences(tokenizers, stores["train"], stores["valid"])

    def open_prepared(self, folder: RunFolder) -> PreparedSentences:
        """Both stores."""
        tokens, prepared = folder.path / "tokens", plain_text.open_stores(folder, SentenceStore.open)
        longest = resolved(folder.settings.data.context, "data.context") - 3
        for name, store in (("train", prepared.train), ("valid", prepared.valid)):
            check_lengths(tokens / name / "offsets.npy", store.offsets, longest)
        return prepared

    def fingerprint(self, settings: Settings, tokenizers: Tokenizers, digests: Sequence[bytes]) -> str:
        """Of files, vocabulary and context."""
        return plain_text.fingerprint_of_plain(settings, tokenizers.tgt, digests, f"context: {settings.data.context}")

    def feeder(self, prepared: PreparedSentences, settings: Settings, device: torch.device) -> MaskedFeeder:
        """Rows with masked tokens."""
        return masked_feeder(prepared.train, prepared.tokenizers.tgt, settings, device)

    def longest(self, prepared: PreparedSentences, settings: Settings) -> PreparedSentences:
        """Sentences that fill the context, two per document."""
        context = resolved(settings.data.context, "data.context")
        length, store = context - 3, prepared.train
        n = 2 * n_rows_of(context, settings)  # pairs of segments share a row
        ids = np.tile(tiled(store.ids, length), n)
        offsets, documents = np.arange(n + 1) * length, np.arange(0, n + 1, 2)
        return replace(prepared, train=SentenceStore(ids, offsets, documents, store.facts))

    def validator(
        self, model: nn.Module, prepared: PreparedSentences, settings: Settings, device: torch.device
    ) -> Validator:
        """The loss on held-out text, with the same masked tokens each time."""
        feeder = masked_feeder(prepared.valid, prepared.tokenizers.tgt, settings, device)
        return Validator(
            model,
            feeder.batches,
            smoothing=settings.training.label_smoothing,
            judge=masked_judge(feeder),
            precision=settings.training.precision,
            criterion=predict_masked_tokens,
        )

    def tokenizers(self, prepared: PreparedSentences) -> Tokenizers:
        """The one vocabulary, for both sides."""
        return prepared.tokenizers

    def finish(self, folder: RunFolder, *, update: int, log: Log) -> None:
        """Score held-out text, predict some masked words, write the report."""
        settings, tokens = folder.settings, folder.path / "tokens"
        filler = MaskFiller.load(folder.path, device=settings.training.device)
        names = {"valid": "valid"} | {name: f"test.{i}" for i, name in enumerate(read_names(tokens / "tests.json"))}
        for name, at in names.items():
            feeder = masked_feeder(SentenceStore.open(tokens / at), filler.vocabulary, settings, filler.device)
            found = Validator(
                filler.model, feeder.batches, smoothing=0.0, judge=masked_judge(feeder), criterion=predict_masked_tokens
            )()
            save_set(folder, "masked_scores", name, found)
            log.say(f"{name}: " + ", ".join(f"{key.replace('_', ' ')} {value:.4g}" for key, value in found.items()))
        valid = SentenceStore.open(tokens / "valid")
        texts = _masked_samples(valid, filler.vocabulary)
        shown = []
        for one in filler.fill(texts) if texts else ():
            predictions = ", ".join(f"{c.token} {c.probability:.0%}" for c in one.masks[0])
            shown.append((one.text, f" → {predictions}"))
        save_generated(folder, "valid", shown, update=update)
        finalize(folder, self.wording, log)


def _check_documents(name: str, n: int) -> None:
    if n < 2:
        raise DataError(
            f"{name} text has {n} document: model.next_sentence = true needs two or more, as half of the pairs "
            "combine two; set data.documents, which says what ends one, or model.next_sentence = false"
        )


def _documents(pieces: Iterable[Piece]) -> Iterator[bool]:
    """Something for each document with text in it."""
    text = False
    for piece in pieces:
        text = text or bool(piece.text.strip())
        if text and piece.ends:
            yield True
            text = False
    if text:
        yield True


def _check_rows(store: SentenceStore, name: str, vocabulary: Vocabulary, settings: Settings) -> None:
    """Refuse a set without anything to predict, before training needs it."""
    if judges_pairs(settings):
        _check_documents(name, store.n_documents)
    if not masked_feeder(store, vocabulary, settings, torch.device("cpu")).plan(0):
        raise DataError(f"{name} text: it has nothing to predict")


def _masked_samples(store: SentenceStore, vocabulary: Vocabulary) -> list[str]:
    """A few held-out sentences, one word of each replaced by <mask>."""
    n, texts = len(store.offsets) - 1, []
    for i in range(N_SAMPLES):
        words = vocabulary.decode(store.span(k := n * i // N_SAMPLES, k + 1)[:SAMPLE_TOKENS].tolist()).split()
        if len(words) > 3:
            place = 1 + (i * 5) % (len(words) - 2)
            texts.append(" ".join([*words[:place], MASK_PIECE, *words[place + 1 :]]))
    return list(dict.fromkeys(texts))
