"""Masked language modelling, with next-sentence prediction as an option (BERT)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from transduce.config.architectures import BertSettings
from transduce.config.model import ModelSettings
from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.data.batch import MaskedBatch
from transduce.data.encoding import encode_sentences
from transduce.data.masking import mask, word_starts
from transduce.data.preparation import Texts
from transduce.data.store import SentenceStore
from transduce.data.text import Piece, read_pieces
from transduce.decoding.mask_filler import MaskFiller
from transduce.decoding.results import MaskedScore
from transduce.errors import DataError, SettingsError
from transduce.evaluation.options import MaskedTextEvaluation
from transduce.evaluation.result_files import Wording, save_generated, save_set
from transduce.evaluation.scored_models import ScoredMaskedText
from transduce.logging import Log
from transduce.runs.folder import RunFolder
from transduce.tasks.base import Prepared, Validation, n_rows_for
from transduce.tasks.defaults import MODEL, TRAINING, UNSMOOTHED, Defaults, Size, choose_context
from transduce.tasks.monolingual import PlainTextTask
from transduce.text.special import MASK_PIECE, Vocabulary
from transduce.training.encoder_feed import MaskedFeeder
from transduce.training.loss import Criterion, predict_masked_tokens
from transduce.training.validate import Judge, Validator

N_SAMPLES, SAMPLE_TOKENS = 8, 40


MASKED = Defaults(
    (
        Size(most=2e6, vocab_size=2_000, preset=("bert-tiny", "bert-tiny"), dropout=0.1, batch=(4096, 8192),
             epochs=40, minutes=(20, 10)),
        Size(most=5e7, vocab_size=8_000, preset=("bert-tiny", "bert-mini"), dropout=0.1, batch=(4096, 16_384),
             epochs=15, minutes=(120, 60)),
        Size(most=math.inf, vocab_size=16_000, preset=("bert-mini", "bert-small"), dropout=0.1, batch=(8192, 32_768),
             epochs=4, minutes=(1440, 720)),
    ),
    {
        **MODEL,
        "tokenizer.mask": (True, "the model predicts masked tokens"),
        "data.context": choose_context,
    },
    {
        **TRAINING,
        "training.stop_by": ("loss", "the goal of the run"),
        "training.label_smoothing": UNSMOOTHED,
    },
)  # fmt: skip


class MaskedTask(PlainTextTask[SentenceStore]):
    """Trains a masked language model on plain text, whose lines are sentences."""

    name = "masked"
    wording = Wording(
        title="A masked language model",
        does="predicts masked tokens",
        command='transduce fill THIS_FOLDER "The capital of France is <mask>."',
        python='MaskFiller.load(FOLDER).fill(["A <mask> runs."])[0].masks[0]',
        samples="Masked words",
        shape="masked language model · {model}",
        limits=("It sees {context} tokens at once.",),
    )
    scored_model = ScoredMaskedText
    inherited = ("data.documents",)
    defaults = MASKED
    store = SentenceStore
    uses = frozenset(
        {
            *(f"data.{key}" for key in ("documents", "context", "masked", "whole_words")),
            *("tokenizer.mask", "tokenizer.exact"),
        }
    )

    def check(self, settings: Settings, model: ModelSettings) -> None:
        assert isinstance(model, BertSettings)
        super().check(settings, model)
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

    def check_texts(self, texts: Texts[Piece], settings: Settings) -> None:
        if judges_pairs(settings):
            for found in texts.sets.values():
                _check_documents(found.name, sum(1 for _ in islice(_documents(found.read()), 2)))

    def encode_set(
        self, folder: Path, records: Iterable[Piece], vocabulary: Vocabulary, settings: Settings, *, name: str
    ) -> SentenceStore:
        longest = _longest(settings)
        return encode_sentences(folder, records, vocabulary, longest=longest, name=name)

    def check_set(self, store: SentenceStore, name: str, vocabulary: Vocabulary, settings: Settings, log: Log) -> None:
        if not masked_feeder(store, vocabulary, settings, torch.device("cpu")).plan(0):
            raise DataError(f"{name} text: it has nothing to predict")

    def describe(self, store: SentenceStore, settings: Settings) -> dict[str, Any]:
        return {"documents": store.n_documents, "bytes": store.facts["bytes"], "tokens": len(store.ids)}

    def criterion(self, settings: Settings) -> Criterion:
        return predict_masked_tokens

    def feeder(self, prepared: Prepared[SentenceStore], settings: Settings, device: torch.device) -> MaskedFeeder:
        return masked_feeder(prepared.train, prepared.tokenizers.tgt, settings, device)

    def longest_rows(self, prepared: Prepared[SentenceStore], settings: Settings) -> Prepared[SentenceStore]:
        length, store = _longest(settings), prepared.train
        n = 2 * n_rows_for(length + 3, settings)  # pairs of segments share a row
        ids = np.tile(np.resize(store.ids[:length], length), n)
        offsets, documents = np.arange(n + 1) * length, np.arange(0, n + 1, 2)
        return replace(prepared, train=SentenceStore(ids, offsets, documents, store.facts))

    def validation(self, prepared: Prepared[SentenceStore], settings: Settings, device: torch.device) -> Validation:
        feeder = masked_feeder(prepared.valid, prepared.tokenizers.tgt, settings, device)
        return Validation(feeder.batches, judge=masked_judge(feeder))

    def finish(self, folder: RunFolder, *, update: int, log: Log) -> None:
        settings, stores = folder.settings, dict(self.held_out_stores(folder))
        filler = MaskFiller.load(folder.path, device=settings.training.device)
        for name, store in stores.items():
            score = _score(filler, masked_feeder(store, filler.vocabulary, settings, filler.device))
            save_set(folder, "masked_scores", name, score.to_json())
            log.say(f"{name}: {score.lines()[0]}")
        texts = _masked_samples(stores["valid"], filler.vocabulary)
        shown = []
        for one in filler.fill(texts) if texts else ():
            predictions = ", ".join(f"{c.token} {c.probability:.0%}" for c in one.masks[0])
            shown.append((one.text, f" → {predictions}"))
        save_generated(folder, "valid", shown, update=update)

    def evaluate(self, run: Path, options: MaskedTextEvaluation, *, device: str = "auto") -> MaskedScore:
        return score_text(MaskFiller.load(run, device=device), options.text, batch_tokens=options.batch_tokens)


def score_text(filler: MaskFiller, path: str | Path, *, batch_tokens: int | None = None) -> MaskedScore:
    """Score a model on masked tokens of the text of a file (`-`: standard input), split as in training.

    The masked tokens follow from the run's seed: figures are reproducible. Validation text gives the training's own
    figures. A single document has no next-sentence accuracy. Raises `DataError`.
    """
    data, training = filler.settings.data, filler.settings.training
    budget = batch_tokens or training.micro_batch_tokens or training.batch_tokens
    budget = max(filler.context, budget or filler.settings.decoding.batch_tokens)
    pieces = read_pieces(path, data.documents)
    store = encode_sentences(None, pieces, filler.vocabulary, longest=filler.context - 3, name=str(path))
    changes = {
        "data": data.model_copy(update={"context": filler.context}),
        "training": training.model_copy(update={"batch_tokens": budget, "micro_batch_tokens": budget}),
    }
    if store.n_documents < 2:
        changes["model"] = filler.settings.model.model_copy(update={"next_sentence": False})
    settings = filler.settings.model_copy(update=changes)
    return _score(filler, masked_feeder(store, filler.vocabulary, settings, filler.device))


def judges_pairs(settings: Settings) -> bool:
    """Whether the model predicts next sentences."""
    return isinstance(settings.model, BertSettings) and settings.model.next_sentence


def masked_feeder(
    store: SentenceStore, vocabulary: Vocabulary, settings: Settings, device: torch.device
) -> MaskedFeeder:
    """Rows with masked tokens; pairs of segments if the model predicts next sentences."""
    data = settings.data
    starts: np.ndarray | None = None
    if data.whole_words:
        starts = word_starts(vocabulary.pieces(range(vocabulary.vocab_size)))
        if starts is None:
            raise SettingsError("data.whole_words = true: the pieces of this vocabulary do not mark the start of words")
    return MaskedFeeder(
        store,
        settings.training,
        device=device,
        context=resolved(data.context, "data.context"),
        masked=partial(mask, vocab_size=vocabulary.vocab_size, rate=data.masked, starts=starts),
        pairs=judges_pairs(settings),
    )


def masked_judge(feeder: MaskedFeeder) -> Judge:
    """Computes the accuracy on masked tokens and, with pairs, on next sentences."""

    def counts(model: Any, batches: Iterable[MaskedBatch]) -> list[tuple[int, int, int, int]]:
        """Of each batch: masked tokens and pairs, each after the number of those predicted correctly."""
        device = next(model.parameters()).device
        found = []
        for batch in (one.to(device) for one in batches):
            hidden, follows = model(*batch.inputs)
            right = int((model.logits(hidden).argmax(-1) == batch.targets).sum())
            followed = 0 if follows is None else int((follows.argmax(-1) == batch.labels).sum())
            found.append((right, batch.n_targets, followed, 0 if follows is None else len(batch.labels)))
        return found

    def score(outputs: Sequence[tuple[int, int, int, int]]) -> dict[str, float]:
        right, n, followed, n_pairs = map(sum, zip(*outputs, strict=True))
        scores = {"masked_accuracy": right / max(1, n)}
        return scores | ({"next_sentence_accuracy": followed / n_pairs} if n_pairs else {})

    return Judge(items=feeder.batches, outputs=counts, score=score)


def _score(filler: MaskFiller, feeder: MaskedFeeder) -> MaskedScore:
    """Score a model on the masked tokens of the feeder's text."""
    validator = Validator(
        filler.model, feeder.batches, smoothing=0.0, judge=masked_judge(feeder), criterion=predict_masked_tokens
    )
    found = validator()
    return MaskedScore(
        loss=found["loss"] if feeder.pairs else found["nll"],  # includes the loss on pairs
        nll=found["nll"],
        masked_accuracy=found["masked_accuracy"],
        next_sentence_accuracy=found.get("next_sentence_accuracy") if feeder.pairs else None,
        n_hidden=sum(batch.n_targets for batch in feeder.batches()),
        n_tokens=len(feeder.store.ids),
        n_bytes=feeder.store.facts["bytes"],
    )


def _longest(settings: Settings) -> int:
    """Most tokens of a sentence: a row has three special tokens."""
    return resolved(settings.data.context, "data.context") - 3


def _check_documents(name: str, n: int) -> None:
    if n < 2:
        raise DataError(
            f"{name} text has {n} document{'' if n else 's'}: model.next_sentence = true needs two or more, as half "
            "of the pairs combine two; set data.documents, which says what ends one, or model.next_sentence = false"
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


def _masked_samples(store: SentenceStore, vocabulary: Vocabulary) -> list[str]:
    n, texts = len(store.offsets) - 1, []
    for i in range(N_SAMPLES):
        words = vocabulary.decode(store.span(k := n * i // N_SAMPLES, k + 1)[:SAMPLE_TOKENS].tolist()).split()
        if len(words) > 3:
            place = 1 + (i * 5) % (len(words) - 2)
            texts.append(" ".join([*words[:place], MASK_PIECE, *words[place + 1 :]]))
    return list(dict.fromkeys(texts))
