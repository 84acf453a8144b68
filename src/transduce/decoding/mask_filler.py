"""Text with <mask> in, predicted words out: `MaskFiller`, for runs of task "masked"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from transduce.config import Settings
from transduce.data.batch import pad_rows
from transduce.data.encoding import sentences_in_memory
from transduce.data.sentence_pairs import pack
from transduce.data.text import read_pieces
from transduce.decoding.loading import Precision, open_model
from transduce.decoding.masked_scoring import masked_feeder, score_masked
from transduce.decoding.results import MaskedScore
from transduce.errors import DataError, RunFolderError
from transduce.text.masks import bare, encode_gaps
from transduce.text.special import MASK, MASK_PIECE, Vocabulary


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


class MaskFiller:
    """Predicts the words behind <mask>."""

    def __init__(self, model: nn.Module, vocabulary: Vocabulary, settings: Settings) -> None:
        """`settings`: those of the run."""
        self.model: Any = model
        self.vocabulary, self.settings = vocabulary, settings
        self.context: int = settings.data.context or settings.model.max_positions
        self.device = next(model.parameters()).device

    @classmethod
    def load(cls, path: str | Path, *, device: str = "auto", precision: Precision = "float32") -> MaskFiller:
        """Load the model of a run folder of task "masked".

        Raises:
            RunFolderError: The folder is missing or damaged.
            SettingsError: The run is of another task, or there is no such device.
        """
        folder, model, tokenizers = open_model(path, task="masked", device=device, precision=precision)
        if MASK not in encode_gaps(tokenizers.tgt, f"a {MASK_PIECE} b"):
            raise RunFolderError(f"{folder.path}: its vocabulary has no {MASK_PIECE}, or is damaged")
        return cls(model, tokenizers.tgt, folder.settings)

    def fill(self, texts: Sequence[str], *, top: int = 5) -> list[Filling]:
        """The `top` predictions for every <mask> in each text, independent of each other.

        Raises `DataError` for a text without <mask>, or one longer than the model's context.
        """
        return [self._fill(text, encode_gaps(self.vocabulary, text), top) for text in texts]

    def evaluate(self, path: str | Path, *, batch_tokens: int | None = None) -> MaskedScore:
        """Score the model on masked tokens of the text of a file (`-`: standard input), split as in training.

        The masked tokens follow from the run's seed: figures are reproducible. Validation text gives the training's own
        figures. A single document has no next-sentence accuracy. Raises `DataError`.
        """
        data, training = self.settings.data, self.settings.training
        budget = batch_tokens or training.micro_batch_tokens or training.batch_tokens
        budget = max(self.context, budget or self.settings.decoding.batch_tokens)
        store = sentences_in_memory(
            read_pieces(path, data.documents), self.vocabulary, longest=self.context - 3, name=str(path)
        )
        changes = {
            "data": data.model_copy(update={"context": self.context}),
            "training": training.model_copy(update={"batch_tokens": budget, "micro_batch_tokens": budget}),
        }
        if store.n_documents < 2:
            changes["model"] = self.settings.model.model_copy(update={"next_sentence": False})
        settings = self.settings.model_copy(update=changes)
        return score_masked(self.model, masked_feeder(store, self.vocabulary, settings, self.device))

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
        likely, chosen = found.values.tolist(), found.indices.tolist()
        filled = framed.ids.tolist()
        for place, row in zip(places, chosen, strict=True):
            filled[place] = row[0]
        return Filling(
            text,
            tuple(
                tuple(self._candidate(filled, place, i, p) for i, p in zip(row, numbers, strict=True))
                for place, row, numbers in zip(places, chosen, likely, strict=True)
            ),
        )

    def _candidate(self, filled: list[int], place: int, token: int, probability: float) -> Prediction:
        text = self.vocabulary.decode([*filled[:place], token, *filled[place + 1 :]])
        return Prediction(bare(self.vocabulary.pieces([token])[0]), text, probability)
