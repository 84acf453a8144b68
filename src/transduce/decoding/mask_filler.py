"""Text with <mask> in, predicted words out: `MaskFiller`, for runs of task "masked"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from transduce.config import BertSettings, Settings, resolved
from transduce.data.batch import MaskedBatch, TrainingBatch, pad_rows
from transduce.data.encoding import encode_sentences
from transduce.data.masking import mask, word_starts
from transduce.data.sentence_pairs import pack
from transduce.data.store import SentenceStore
from transduce.data.text import read_pieces
from transduce.decoding.loading import RunModel
from transduce.decoding.results import MaskedScore
from transduce.errors import DataError, RunFolderError, SettingsError
from transduce.runs.folder import RunFolder
from transduce.text.special import MASK, MASK_PIECE, Vocabulary, bare, encode_with_masks
from transduce.text.tokenizer import Tokenizers
from transduce.training.encoder_feed import MaskedFeeder
from transduce.training.loss import predict_masked_tokens
from transduce.training.validate import Judge, Validator


@dataclass(frozen=True, slots=True)
class Prediction:
    """A piece for a mask, the text with it (and the most likely pieces for other masks), and its probability."""

    token: str
    text: str
    probability: float


@dataclass(frozen=True, slots=True)
class Filling:
    """A text, and for each of its masks the most likely pieces, best first."""

    text: str
    masks: tuple[tuple[Prediction, ...], ...]


class MaskFiller(RunModel):
    """Predicts the words behind <mask>."""

    task = "masked"

    def __init__(self, model: nn.Module, vocabulary: Vocabulary, settings: Settings) -> None:
        """`settings`: those of the run."""
        self.model: Any = model
        self.vocabulary, self.settings = vocabulary, settings
        assert isinstance(settings.model, BertSettings), "the architecture of masked models"
        self.context: int = settings.data.context or settings.model.max_positions
        self.device = next(model.parameters()).device

    @classmethod
    def _from_run(cls, folder: RunFolder, model: nn.Module, tokenizers: Tokenizers) -> MaskFiller:
        if MASK not in encode_with_masks(tokenizers.tgt, f"a {MASK_PIECE} b"):
            raise RunFolderError(f"{folder.path}: its vocabulary has no {MASK_PIECE}, or is damaged")
        return cls(model, tokenizers.tgt, folder.settings)

    def fill(self, texts: Sequence[str], *, top: int = 5) -> list[Filling]:
        """The `top` predictions for every <mask> in each text, independent of each other.

        Raises `DataError` for a text without <mask>, or one longer than the model's context.
        """
        return [self._fill(text, encode_with_masks(self.vocabulary, text), top) for text in texts]

    def evaluate(self, path: str | Path, *, batch_tokens: int | None = None) -> MaskedScore:
        """Score the model on masked tokens of the text of a file (`-`: standard input), split as in training.

        The masked tokens follow from the run's seed: figures are reproducible. Validation text gives the training's own
        figures. A single document has no next-sentence accuracy. Raises `DataError`.
        """
        data, training = self.settings.data, self.settings.training
        budget = batch_tokens or training.micro_batch_tokens or training.batch_tokens
        budget = max(self.context, budget or self.settings.decoding.batch_tokens)
        pieces = read_pieces(path, data.documents)
        store = encode_sentences(None, pieces, self.vocabulary, longest=self.context - 3, name=str(path))
        changes = {
            "data": data.model_copy(update={"context": self.context}),
            "training": training.model_copy(update={"batch_tokens": budget, "micro_batch_tokens": budget}),
        }
        if store.n_documents < 2:
            changes["model"] = self.settings.model.model_copy(update={"next_sentence": False})
        settings = self.settings.model_copy(update=changes)
        return _score_masked(self.model, masked_feeder(store, self.vocabulary, settings, self.device))

    def _fill(self, text: str, ids: list[int], top: int) -> Filling:
        framed = pack(ids)
        places = [i for i, token in enumerate(framed.ids.tolist()) if token == MASK]
        if not places:
            raise DataError(f"there is no <mask> in {text!r}; put it where a word is to be predicted")
        if len(framed.ids) > self.context:
            raise DataError(
                f"{len(framed.ids)} tokens with special ones; this model's context is {self.context}: {text[:60]!r}..."
            )
        with torch.inference_mode():
            rows = pad_rows([framed.ids]).to(self.device)
            hidden, _ = self.model(rows, torch.zeros_like(rows), torch.tensor(places, device=self.device))
            logits = self.model.logits(hidden).float()
            logits[:, : MASK + 1] = float("-inf")
            found = logits.softmax(-1).topk(min(top, logits.shape[1] - MASK - 1))
        filled = framed.ids.copy()
        filled[places] = found.indices[:, 0].cpu().numpy()

        def prediction(place: int, token: int, probability: float) -> Prediction:
            ids = [*filled[:place].tolist(), token, *filled[place + 1 :].tolist()]
            return Prediction(bare(self.vocabulary.pieces([token])[0]), self.vocabulary.decode(ids), probability)

        tokens, probabilities = found.indices.tolist(), found.values.tolist()
        masks = (
            tuple(prediction(place, *one) for one in zip(*row, strict=True))
            for place, *row in zip(places, tokens, probabilities, strict=True)
        )
        return Filling(text, tuple(masks))


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

    def judge(model: nn.Module) -> dict[str, float]:
        right = n = followed = n_pairs = 0
        known: Any = model
        for batch in feeder.batches():
            assert isinstance(batch, MaskedBatch)
            hidden, follows = known(*batch.inputs)
            right += int((known.logits(hidden).argmax(-1) == batch.targets).sum())
            n += batch.n_targets
            if follows is not None:
                followed += int((follows.argmax(-1) == batch.labels).sum())
                n_pairs += len(batch.labels)
        scores = {"masked_accuracy": right / max(1, n)}
        return scores | ({"next_sentence_accuracy": followed / n_pairs} if n_pairs else {})

    return judge


def _score_masked(model: nn.Module, feeder: MaskedFeeder) -> MaskedScore:
    """Score a model on the masked tokens of the feeder's text."""
    n_hidden = 0

    def batches() -> Iterator[TrainingBatch]:
        nonlocal n_hidden
        for batch in feeder.batches():
            n_hidden += batch.n_targets
            yield batch

    found = Validator(model, batches, smoothing=0.0, judge=masked_judge(feeder), criterion=predict_masked_tokens)()
    return MaskedScore(
        loss=found["loss"] if feeder.pairs else found["nll"],  # includes the loss on pairs
        nll=found["nll"],
        masked_accuracy=found["masked_accuracy"],
        next_sentence_accuracy=found.get("next_sentence_accuracy") if feeder.pairs else None,
        n_hidden=n_hidden,
        n_tokens=len(feeder.store.ids),
        n_bytes=feeder.store.facts["bytes"],
    )
