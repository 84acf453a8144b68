"""Text with <mask> in, predicted words out: `MaskFiller`, for runs of task "masked"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from transduce.config.architectures import BertSettings
from transduce.config.settings import Settings
from transduce.data.batch import pad_rows
from transduce.data.store import pack
from transduce.decoding.open_run import open_model
from transduce.errors import DataError, RunFolderError
from transduce.text.special import MASK, MASK_PIECE, Vocabulary, bare, encode_with_masks


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted piece for a mask, its probability, and the text with it and the best pieces for all other masks."""

    token: str
    text: str
    probability: float


@dataclass(frozen=True, slots=True)
class Filling:
    """A text, and the most probable pieces for each of its masks, best first."""

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
        """Load the model of a run folder; errors as for `open_model`."""
        folder, model, tokenizers = open_model(path, task=cls.task, device=device)
        if MASK not in encode_with_masks(tokenizers.tgt, f"a {MASK_PIECE} b"):
            raise RunFolderError(f"{folder.path}: its vocabulary has no {MASK_PIECE}, or is damaged")
        return cls(model, tokenizers.tgt, folder.settings)

    def fill(self, texts: Sequence[str], *, top: int = 5) -> list[Filling]:
        """The `top` predictions for every <mask> in each text, independent of each other.

        Raises `DataError` for a text without <mask>, or one longer than the model's context.
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
