"""Validation: the loss over all held-out text and, with a `Judge`, the scores of real output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from transduce.data.batch import TrainingBatch
from transduce.training.loss import Carry, Criterion, autocast, predict_tokens
from transduce.training.ranks import SINGLE_RANK, Ranks


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Functions that score a model's outputs for held-out text, such as translations by `bleu` and `chrf`.

    items: returns the work to divide among ranks, such as sentences. Neighbours should take equally long.
    outputs: returns the model's output for each given item, as a JSON value.
    score: computes scores by name from the outputs for all items, in order; higher is better.
    """

    items: Callable[[], Iterable[Any]]
    outputs: Callable[[nn.Module, Iterable[Any]], list[Any]]
    score: Callable[[list[Any]], Mapping[str, float]]


SHOWN_SCORES = {
    "bleu": "BLEU {:.1f}",
    "chrf": "chrF {:.1f}",
    "bits_per_byte": "{:.3f} bits per byte",
    "accuracy": "accuracy {:.1%}",
    "macro_f1": "macro F1 {:.1%}",
    "masked_accuracy": "masked-token accuracy {:.1%}",
    "next_sentence_accuracy": "next-sentence accuracy {:.1%}",
}


def format_validation(update: int, epochs: float, scores: Mapping[str, float], *, better: bool) -> str:
    """Format the scores of a validation as a line of progress."""
    texts = [f"update {update}", f"epoch {epochs:.1f}", f"validation loss {scores['loss']:.3f}"]
    texts += [form.format(scores[name]) for name, form in SHOWN_SCORES.items() if name in scores]
    by_direction = [f"{name.removeprefix('bleu ')} {bleu:.1f}" for name, bleu in scores.items() if "bleu " in name]
    texts += [f"({', '.join(by_direction)})"] if by_direction else []
    return "  ".join(texts) + ("  (best)" if better else "")


def judging(device: torch.device, precision: str) -> str:
    """Return the precision for translating in a validation: the training's on a GPU, float32, the fastest, on a CPU."""
    return precision if device.type == "cuda" else "float32"


class Validator:
    """Scores the current weights of a model without advancing the random generators of the training."""

    def __init__(
        self,
        model: nn.Module,
        batches: Callable[[], Iterable[TrainingBatch]],
        *,
        smoothing: float,
        judge: Judge | None = None,
        n_bytes: int = 0,
        precision: str = "float32",
        criterion: Criterion = predict_tokens,
        in_order: bool = False,
    ) -> None:
        """`batches`: returns the batches of the held-out text on the model's device; called for each validation.

        `n_bytes`: size of the text in bytes, for the loss in bits per byte; 0 if not every token is predicted.
        `in_order`: whether each batch continues the previous batch, so that the model needs its carry.
        """
        self.model, self.batches, self.judge, self.n_bytes, self.in_order = model, batches, judge, n_bytes, in_order
        self.smoothing, self.precision, self.criterion = smoothing, precision, criterion

    def __call__(self, ranks: Ranks = SINGLE_RANK) -> dict[str, float]:
        """Return `loss` (smoothed) and `nll` in nats per target token, `perplexity`, and the judge's scores.

        If `n_bytes` is known, also return `bits_per_byte`, which does not depend on the vocabulary. All `ranks` call
        this and share the batches and the judge's items. Only the main process scores the outputs.
        """
        training, device = self.model.training, next(self.model.parameters()).device
        self.model.eval()
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        try:
            # no_grad, not inference_mode: training will also use buffers that are first made here.
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                sums = ranks.gather({"sums": self._sums(ranks, device)})
                scores = ranks.broadcast(lambda: self._losses(*torch.stack([*sums.values()]).sum(0).tolist()))
                if self.judge is not None and math.isfinite(scores["loss"]):
                    scores |= self._judged(self.judge, ranks)
        finally:
            self.model.train(training)
        return scores

    def _judged(self, judge: Judge, ranks: Ranks) -> Mapping[str, float]:
        n = 1 if ranks.in_step else ranks.size  # if weights are sharded, only the main process has the whole model
        own: list[Any] = []
        with ranks.whole(self.model) as model:
            device = next(model.parameters()).device
            if ranks.rank < n:
                with autocast(device, judging(device, self.precision)):
                    own = judge.outputs(model, islice(judge.items(), ranks.rank, None, n))
            shares = [ranks.broadcast(lambda: own, source=rank) for rank in range(n)]
        outputs: list[Any] = [None] * sum(map(len, shares))
        for rank, share in enumerate(shares):
            outputs[rank::n] = share
        return ranks.broadcast(lambda: judge.score(outputs))

    def _sums(self, ranks: Ranks, device: torch.device) -> Tensor:
        """Return the sums of loss, of -log p and of targets over this rank's batches, as one tensor [3]."""
        model: Any = self.model
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        carry: Carry = ()
        for batch, counts in self._share(ranks):
            with ranks.computing(last=False), autocast(device, self.precision):
                loss, nll, carry = self.criterion(model, batch, smoothing=self.smoothing, carry=carry)
            if counts:
                sums += torch.stack([loss, nll, loss.new_tensor(batch.n_targets)])
        return sums.cpu()

    def _share(self, ranks: Ranks) -> Iterator[tuple[TrainingBatch, bool]]:
        """Yield pairs of a batch for this rank and whether its loss counts.

        Batches that do not count are repetitions, so that all ranks get equally many.
        """
        batches = iter(self.batches())
        if self.in_order:
            if ranks.in_step or ranks.is_main_process:
                yield from ((batch, ranks.is_main_process) for batch in batches)
            return
        while of_ranks := list(islice(batches, ranks.size)):
            yield of_ranks[min(ranks.rank, len(of_ranks) - 1)], ranks.rank < len(of_ranks)

    def _losses(self, loss_sum: float, nll_sum: float, n_targets: float) -> dict[str, float]:
        n_targets = max(n_targets, 1)
        nll = nll_sum / n_targets
        scores = {"loss": loss_sum / n_targets, "nll": nll, "perplexity": math.exp(min(nll, 700.0))}
        return scores | ({"bits_per_byte": nll_sum / math.log(2) / self.n_bytes} if self.n_bytes else {})
