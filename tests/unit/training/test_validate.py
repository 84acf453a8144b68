from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import toys
from toys import CPU, pairs, settings
from transduce.models.registry import build_model
from transduce.training.feed import PairFeeder
from transduce.training.validate import Validator, judging


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return build_model(settings().model, n_src=24, n_tgt=24).train()


def held_out(**training: object) -> PairFeeder:
    return PairFeeder(pairs(50, seed=2), settings(**training).training, device=CPU)


def test_the_loss_equals_that_of_all_pairs_one_by_one(model: nn.Module) -> None:
    """Against log_softmax of each sentence alone, in float64: mean over tokens, not over batches."""
    scores = Validator(model, held_out().batches, smoothing=0.1)()
    model.eval()
    loss = nll = n = 0.0
    for src, tgt in map(pairs(50, seed=2).__getitem__, range(50)):
        src_ids = torch.tensor([[*src.tolist(), 3]])
        with torch.no_grad():
            logits = model.logits(model(src_ids, torch.tensor([[2, *tgt.tolist()]])))  # type: ignore[operator]
        log_p = torch.log_softmax(logits[0].double(), -1)
        gold = log_p.gather(1, torch.tensor([*tgt.tolist(), 3])[:, None]).sum()
        nll -= float(gold)
        loss -= float(0.9 * gold + 0.1 * log_p.mean(1).sum())
        n += len(tgt) + 1
    assert scores["nll"] == pytest.approx(nll / n, rel=1e-5)
    assert scores["loss"] == pytest.approx(loss / n, rel=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(nll / n), rel=1e-4)


def test_validation_does_not_affect_training(model: nn.Module) -> None:
    """Mode, weights and random state are as before, even if the judge draws random numbers."""
    weights = [p.detach().clone() for p in model.parameters()]

    def judge(judged: nn.Module) -> dict[str, float]:
        assert not judged.training
        assert not torch.is_grad_enabled()
        return {"bleu": float(torch.rand(()) * 0) + 12.5, "chrf": 30.0}

    before = torch.get_rng_state()
    scores = Validator(model, held_out().batches, smoothing=0.1, judge=toys.judge(judge))()
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert (scores["bleu"], scores["chrf"]) == (12.5, 30.0)


def test_a_judge_that_fails_leaves_the_model_in_training(model: nn.Module) -> None:
    def judge(judged: nn.Module) -> dict[str, float]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        Validator(model, held_out().batches, smoothing=0.1, judge=toys.judge(judge))()
    assert model.training


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_on_a_gpu_the_judge_translates_in_the_precision_of_training(device: str) -> None:
    seen = []

    def judge(judged: nn.Module) -> dict[str, float]:
        seen.append(torch.is_autocast_enabled(device))
        return {"bleu": 1.0}

    model = build_model(settings().model, n_src=24, n_tgt=24).to(device)
    feeder = PairFeeder(pairs(9, seed=2), settings().training, device=torch.device(device))
    Validator(model, feeder.batches, smoothing=0.1, judge=toys.judge(judge), precision="bfloat16")()
    assert seen == [device == "cuda"]
    assert judging(torch.device("cuda"), "bfloat16") == "bfloat16"
    assert judging(torch.device("cpu"), "bfloat16") == "float32"
