"""Samples follow the model's distribution and do not depend on their batch."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from oracle import search as oracle
from oracle.stand_in import BOS, EOS, PAD, UNK, StandIn
from transduce.config.decoding import DecodingOptions
from transduce.decoding.sampling import draw, filter_logits, sample

SRC = torch.tensor([[4, 5, EOS, PAD], [6, EOS, PAD, PAD], [4, 4, 6, EOS]])


def test_draw_inverts_the_summed_probabilities() -> None:
    probability = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    for number, token in [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (0.9999, 4), (1.0, 4)]:
        assert draw(probability, torch.tensor([number], dtype=torch.float64)).item() == token


def test_frequencies_are_the_models_probabilities() -> None:
    """Frequencies of all outputs of at most three tokens, compared with their exact probabilities."""
    model, n = StandIn(6, end=1.0, sharpness=1.0), 4000
    src, keys = SRC[:1, :3].expand(n // 400, -1), [(i,) for i in range(n // 400)]
    found = sample(model, src, DecodingOptions(sample=True, n_best=400), max_length=3, keys=keys)
    seen = Counter(h.ids for of_one in found for h in of_one if h.finished)
    forbidden = 0.0
    for ids, log_prob, _ in oracle.all_outputs(model.next_log_probs, [4, 5, EOS], max_length=3, alpha=1.0):
        for t in range(len(ids) + 1):  # PAD, UNK and BOS are never drawn: renormalize
            known = model.next_log_probs([4, 5, EOS], ids[:t])
            forbidden = math.log1p(-math.exp(known[PAD]) - math.exp(known[UNK]) - math.exp(known[BOS]))
            log_prob -= forbidden
        p = math.exp(log_prob)
        assert abs(seen[ids] / n - p) < 5 * math.sqrt(p * (1 - p) / n) + 1e-9, ids


def test_a_sample_depends_on_its_seed_and_sentence_only() -> None:
    model, seeds = StandIn(9), [(1, 0), (1, 1), (1, 2)]
    together = sample(model, SRC, DecodingOptions(sample=True, n_best=5), max_length=[7, 9, 8], keys=seeds)
    for i, limit in enumerate([7, 9, 8]):
        alone = sample(model, SRC[i : i + 1], DecodingOptions(sample=True, n_best=5), max_length=limit, keys=[seeds[i]])
        assert alone[0] == together[i]
    fewer = sample(model, SRC, DecodingOptions(sample=True, n_best=2), max_length=[7, 9, 8], keys=seeds)
    assert fewer == [found[:2] for found in together]
    other = sample(
        model, SRC, DecodingOptions(sample=True, n_best=5), max_length=[7, 9, 8], keys=[(2, 0), (2, 1), (2, 2)]
    )
    assert other != together


@pytest.mark.parametrize(
    "sampling",
    [
        DecodingOptions(sample=True, top_k=1),
        DecodingOptions(sample=True, top_p=0.0),
        DecodingOptions(sample=True, temperature=1e-4),
        DecodingOptions(sample=True, temperature=1e-40),
    ],
    ids=str,
)
def test_sampling_the_most_likely_token_is_greedy_search(sampling: DecodingOptions) -> None:
    model = StandIn(9)
    for src, found in zip(
        SRC, sample(model, SRC, sampling.model_copy(update={"n_best": 2}), max_length=8, keys=[(0,)] * 3), strict=True
    ):
        ids = [i for i in src.tolist() if i != PAD]
        (greedy,) = oracle.beam_search(model.next_log_probs, ids, beam=1, max_length=8, alpha=1.0)
        for h in found:
            assert (h.ids, h.finished) == (greedy[0], greedy[3])
            assert h.log_prob == pytest.approx(greedy[1], abs=1e-4)


def test_sampling_ends_when_no_open_sentence_is_wanted() -> None:
    model, keys, options, limits = StandIn(9, end=-9.0), [(0,), (1,), (2,)], DecodingOptions(sample=True), [2, 4, 30]
    whole = sample(model, SRC, options, max_length=limits, keys=keys)
    part = sample(model, SRC, options, max_length=limits, keys=keys, is_wanted=lambda place: place == 1)
    assert part == [*whole[:2], []]


def test_log_probabilities_ignore_temperature_and_cuts() -> None:
    model = StandIn(9)
    sampling = DecodingOptions(sample=True, temperature=2.0, top_k=5, top_p=0.9)
    (found,) = sample(model, SRC[:1, :3], sampling.model_copy(update={"n_best": 20}), max_length=9, keys=[(3,)])
    for h in found:
        tokens = (*h.ids, EOS) if h.finished else h.ids
        total = sum(model.next_log_probs([4, 5, EOS], tokens[:t])[token] for t, token in enumerate(tokens))
        assert h.log_prob == pytest.approx(total, abs=1e-4)
        assert h.score == pytest.approx(total / len(tokens), abs=1e-4)
        assert not {PAD, UNK, BOS, EOS} & set(h.ids)


# --- filters

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]]).log()


def kept(logits: torch.Tensor) -> list[list[int]]:
    return [(row > -math.inf).nonzero().flatten().tolist() for row in logits]


def test_temperature() -> None:
    assert filter_logits(LOGITS, DecodingOptions(sample=True)) is LOGITS
    sharp = filter_logits(LOGITS, DecodingOptions(sample=True, temperature=0.5)).softmax(-1)
    torch.testing.assert_close(sharp, LOGITS.exp() ** 2 / (LOGITS.exp() ** 2).sum(-1, keepdim=True))


def test_top_k() -> None:
    assert kept(filter_logits(LOGITS, DecodingOptions(sample=True, top_k=2))) == [[0, 1], [2, 3]]
    assert filter_logits(LOGITS, DecodingOptions(sample=True, top_k=4)) is LOGITS


@pytest.mark.parametrize(
    ("p", "first"), [(0.0, [0]), (0.5, [0]), (0.51, [0, 1]), (0.9, [0, 1, 2]), (1.0, [0, 1, 2, 3])]
)
def test_top_p(p: float, first: list[int]) -> None:
    assert kept(filter_logits(LOGITS, DecodingOptions(sample=True, top_p=p))) == [first, sorted(3 - i for i in first)]


@hypothesis_settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), p=st.floats(0.0, 1.0), n=st.integers(2, 40))
def test_top_p_keeps_the_smallest_set_that_reaches_p(seed: int, p: float, n: int) -> None:
    logits = (torch.randn(3, n, generator=torch.Generator().manual_seed(seed)) * 3).double()
    for row, filtered in zip(logits, filter_logits(logits, DecodingOptions(sample=True, top_p=p)), strict=True):
        probability = row.softmax(-1)
        chosen = probability[filtered > -math.inf]
        assert torch.equal(filtered[filtered > -math.inf], row[filtered > -math.inf])
        assert chosen.min() >= probability[filtered == -math.inf].max() if len(chosen) < n else True
        assert chosen.sum() >= p - 1e-9
        assert len(chosen) == 1 or chosen.sum() - chosen.min() < p + 1e-9
