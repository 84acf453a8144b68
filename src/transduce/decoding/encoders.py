"""Inference with encoders: `TextClassifier` predicts labels of texts, `MaskFiller` predicts words for <mask>."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from transduce.config.architectures import BertSettings
from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.data.batch import collate_labelled, pad_rows
from transduce.data.batching import plan
from transduce.data.store import LabelStore, Packed, pack, pack_texts
from transduce.decoding.open_run import open_model
from transduce.errors import DataError, RunFolderError
from transduce.text.special import MASK, MASK_PIECE, Vocabulary, bare, encode_with_masks

BATCH_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Classification:
    """The predicted label of a text or text pair, and the probability of each label.

    `full`: the text fills the maximum length of the model, and may have been cut.
    """

    texts: tuple[str, ...]
    label: str
    probability: float
    probabilities: dict[str, float]
    full: bool = False


class TextClassifier:
    """Predicts the label of a text, or of a pair of texts."""

    task = "classification"

    def __init__(self, model: nn.Module, vocabulary: Vocabulary, labels: Sequence[str], *, longest: int) -> None:
        self.model: Any = model
        self.vocabulary, self.labels, self.longest = vocabulary, tuple(labels), longest
        self.device = next(model.parameters()).device

    @classmethod
    def load(cls, path: str | Path, *, device: str = "auto") -> TextClassifier:
        """Load the model of a run folder. Raises the errors of `open_model`."""
        folder, model, tokenizers = open_model(path, task=cls.task, device=device)
        data = folder.settings.data
        labels = resolved(data.labels, "data.labels")
        return cls(model, tokenizers.tgt, labels, longest=longest_of(folder.settings.model, data.max_length))

    def classify(self, texts: Sequence[str | tuple[str, ...]]) -> list[Classification]:
        """Predict the label of each text, or of each pair. Raises `DataError` for a mixture of texts and pairs."""
        sides = [(text,) if isinstance(text, str) else text for text in texts]
        if len({len(side) for side in sides}) > 1:
            raise DataError("a mixture of single texts and pairs of texts; give one kind")
        if sides and len(sides[0]) > 2:
            raise DataError(f"{len(sides[0])} texts in one example; a label belongs to one text or to a pair")
        n = self.vocabulary.chunk
        return [result for first in range(0, len(sides), n) for result in self._classify(sides[first : first + n])]

    def _classify(self, sides: Sequence[tuple[str, ...]]) -> list[Classification]:
        packed = pack_texts(sides, self.vocabulary, longest=self.longest)
        results = []
        for side, example, row in zip(sides, packed, self.probabilities(packed).tolist(), strict=True):
            if not np.isfinite(row).all():
                raise DataError(
                    f"{' | '.join(side)[:200]}: the model's result is not a number; its values are too large"
                )
            probabilities = dict(zip(self.labels, row, strict=True))
            best = max(probabilities, key=probabilities.__getitem__)
            full = len(example.ids) >= self.longest
            results.append(Classification(side, best, probabilities[best], probabilities, full))
        return results

    def predict(self, store: LabelStore) -> list[int]:
        """Return the label index predicted for each stored text."""
        return [int(i) for i in self.probabilities([store[i] for i in range(len(store))]).argmax(1)]

    def probabilities(self, packed: Sequence[Packed]) -> np.ndarray:
        """Return the probability of each label for each encoded text, [n, L]."""
        result = np.zeros((len(packed), len(self.labels)))
        lengths = np.array([len(example.ids) for example in packed], dtype=np.int64)
        with torch.inference_mode():
            for indices in plan(lengths, lengths, budget=BATCH_TOKENS, seed=0, epoch=0):
                batch = collate_labelled([packed[int(i)] for i in indices], [0] * len(indices)).to(self.device)
                result[indices] = self.model(*batch.inputs).float().softmax(-1).cpu().numpy()
        return result


def longest_of(model: Any, max_length: int) -> int:
    """Maximum number of tokens of a text, including [CLS] and [SEP]."""
    return max_length if model.position_limit is None else min(max_length, model.position_limit)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted piece for a mask, with its probability.

    `text`: the text with this piece, and the best pieces for all other masks.
    """

    token: str
    text: str
    probability: float


@dataclass(frozen=True, slots=True)
class Filling:
    """A text, and for each of its masks the most probable pieces, best first."""

    text: str
    masks: tuple[tuple[Prediction, ...], ...]


class MaskFiller:
    """Predicts the pieces that <mask> stands for."""

    task = "masked"

    def __init__(self, model: nn.Module, vocabulary: Vocabulary, settings: Settings) -> None:
        self.model: Any = model
        self.vocabulary, self.settings = vocabulary, settings
        assert isinstance(settings.model, BertSettings), "the architecture of masked models"
        self.context: int = settings.data.context or settings.model.max_positions
        self.device = next(model.parameters()).device

    @classmethod
    def load(cls, path: str | Path, *, device: str = "auto") -> MaskFiller:
        """Load the model of a run folder. Raises the errors of `open_model`."""
        folder, model, tokenizers = open_model(path, task=cls.task, device=device)
        if MASK not in encode_with_masks(tokenizers.tgt, f"a {MASK_PIECE} b"):
            raise RunFolderError(f"{folder.path}: its vocabulary has no {MASK_PIECE}, or is damaged")
        return cls(model, tokenizers.tgt, folder.settings)

    def fill(self, texts: Sequence[str], *, top: int = 5) -> list[Filling]:
        """Predict the `top` pieces for every <mask> of each text. Each mask is predicted independently.

        Raises `DataError` for a text without <mask>, or longer than the model's context.
        """
        return [self._fill(text, encode_with_masks(self.vocabulary, text), top) for text in texts]

    def _fill(self, text: str, ids: list[int], top: int) -> Filling:
        framed = pack(ids)
        positions = [i for i, token in enumerate(framed.ids.tolist()) if token == MASK]
        if not positions:
            raise DataError(f"there is no <mask> in {text!r}; put it where a word is to be predicted")
        if len(framed.ids) > self.context:
            raise DataError(
                f"{len(framed.ids)} tokens with special ones; this model's context is {self.context}: {text[:60]!r}..."
            )
        with torch.inference_mode():
            rows = pad_rows([framed.ids]).to(self.device)
            hidden, _ = self.model(rows, torch.zeros_like(rows), torch.tensor(positions, device=self.device))
            logits = self.model.logits(hidden).float()
            logits[:, : MASK + 1] = float("-inf")
            best = logits.softmax(-1).topk(min(top, logits.shape[1] - MASK - 1))
        filled = framed.ids.copy()
        filled[positions] = best.indices[:, 0].cpu().numpy()

        def prediction(position: int, token: int, probability: float) -> Prediction:
            ids = [*filled[:position].tolist(), token, *filled[position + 1 :].tolist()]
            return Prediction(bare(self.vocabulary.pieces([token])[0]), self.vocabulary.decode(ids), probability)

        tokens, probabilities = best.indices.tolist(), best.values.tolist()
        masks = (
            tuple(prediction(position, *piece) for piece in zip(*row, strict=True))
            for position, *row in zip(positions, tokens, probabilities, strict=True)
        )
        return Filling(text, tuple(masks))
