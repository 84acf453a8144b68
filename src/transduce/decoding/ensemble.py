"""Ensembles: translation models that choose each token together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transduce.nn.masks import SourceInput
from transduce.nn.state import DecodingState


@dataclass(frozen=True, slots=True)
class EnsembleState:
    """The decoding state of each model. See `DecodingState`."""

    states: Sequence[DecodingState]

    def reorder(self, rows: Int[Tensor, " N"]) -> None:
        for state in self.states:
            state.reorder(rows)

    def select(self, sentences: Int[Tensor, " b"]) -> None:
        for state in self.states:
            state.select(sentences)


class Ensemble(nn.Module):
    """Encoder-decoders with the same vocabularies, of any architectures and sizes, as a single model.

    The probability of a token is the arithmetic mean of the models' probabilities, as in fairseq and Sockeye. The mean
    is a distribution, so that scores are log-probabilities and samples can be drawn. The mean of the logarithms, which
    Marian and OpenNMT-py take by default, is neither, and lets each model rule out a token.

    The hidden states of the ensemble are the concatenated hidden states of the models.
    """

    def __init__(self, models: Sequence[Any]) -> None:
        """`models`: `EncoderDecoder`s."""
        super().__init__()
        self.models: Any = nn.ModuleList(models)
        self._widths = [model.output_weight.shape[1] for model in models]

    def start(self, src: SourceInput, *, capacity: int, n_beams: int) -> EnsembleState:
        return EnsembleState([model.start(src, capacity=capacity, n_beams=n_beams) for model in self.models])

    def advance(self, ids: Int[Tensor, "N T"], state: EnsembleState) -> Float[Tensor, "N T D"]:
        steps = zip(self.models, state.states, strict=True)
        return torch.cat([model.advance(ids, own) for model, own in steps], -1)

    def read(self, *inputs: Tensor) -> Iterator[Float[Tensor, "B T D"]]:
        """Yield hidden states for scoring; see `TokenPredictor.read`."""
        yield torch.cat([model(*inputs) for model in self.models], -1)

    def logits(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        """Logarithms of the mean of the models' probabilities, float32."""
        parts = zip(self.models, hidden.split(self._widths, -1), strict=True)
        log_probs = [model.logits(part.contiguous()).float().log_softmax(-1) for model, part in parts]
        return mean_log_probs(log_probs)


def mean_log_probs(log_probs: Sequence[Float[Tensor, "*B V"]]) -> Float[Tensor, "*B V"]:
    """Logarithms of the mean of the probabilities.

    The result of a row does not depend on other rows. On a CPU that is not true of PyTorch's `logsumexp` and
    `logaddexp`, which may round a number differently at another position of a tensor.
    """
    highest = reduce(torch.maximum, log_probs)
    total = reduce(torch.add, [(values - highest).exp() for values in log_probs])
    return highest + (total / len(log_probs)).log()
