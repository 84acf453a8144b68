"""Beam search against exhaustive search; samples follow the model's distribution and do not depend on their batch."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from oracle import search as oracle
from oracle.stand_in import BOS, EOS, PAD, UNK, StandIn, State
from transduce.config.decoding import DecodingOptions
from transduce.decoding.constraints import Beginning
from transduce.decoding.engine import Hypothesis
from transduce.decoding.sampling import draw, filter_logits, sample
from transduce.decoding.search import beam_search

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


INF = math.inf


def sources(*lengths: int, seed: int = 0, n_tokens: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [[*torch.randint(4, 4 + n_tokens, (n,), generator=generator).tolist(), EOS] for n in lengths]


def pad(srcs: list[list[int]], to: int = 0) -> Tensor:
    width = max(to, *map(len, srcs))
    return torch.tensor([src + [PAD] * (width - len(src)) for src in srcs])


def same(ours: list[Hypothesis], theirs: list[tuple[tuple[int, ...], float, float, bool]]) -> None:
    for hypothesis, (ids, log_prob, _, _) in zip(ours, theirs, strict=True):
        # The same tokens in another order may tie up to rounding; then either may come first.
        tied = sorted(hypothesis.ids) == sorted(ids) and abs(hypothesis.log_prob - log_prob) < 1e-5
        assert hypothesis.ids == ids or tied
    assert [h.finished for h in ours] == [t[3] for t in theirs]
    for hypothesis, (_, log_prob, score, _) in zip(ours, theirs, strict=True):
        assert hypothesis.log_prob == pytest.approx(log_prob, abs=1e-4)
        assert hypothesis.score == pytest.approx(score, abs=1e-4)


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    beam=st.integers(1, 6),
    n_best=st.integers(1, 6),
    alpha=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    patience=st.sampled_from([0.5, 1.0, 2.0, INF]),
    end=st.sampled_from([-3.0, 0.0, 1.5, 4.0]),
    limits=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    n_tokens=st.sampled_from([5, 9, 300]),
    ngram=st.sampled_from([0, 0, 1, 2, 3]),
    forced=st.lists(st.integers(0, 2), max_size=4),
)
def test_equals_a_beam_search_on_lists(
    seed: int,
    beam: int,
    n_best: int,
    alpha: float,
    patience: float,
    end: float,
    limits: list[int],
    n_tokens: int,
    ngram: int,
    forced: list[int],
) -> None:
    """For every sentence of any batch; a vocabulary of 300 takes the two-stage selection."""
    n_best = min(n_best, beam)
    model = StandIn(min(n_tokens, 60) if n_tokens == 300 else n_tokens, seed=seed, end=end)
    if n_tokens == 300:
        model = Wide(model, n_tokens)
    srcs = sources(*(1 + (seed + i) % 4 for i in range(len(limits))), seed=seed, n_tokens=1)
    start = [EOS + 1 + i % (n_tokens - EOS - 1) for i in forced] if n_tokens != 300 else []
    prefixes = [start[: i % 3 * limit // 2] for i, limit in enumerate(limits)]
    ours = beam_search(
        model,
        pad(srcs),
        DecodingOptions(beam=beam, n_best=n_best, length_penalty=alpha, no_repeat_ngram=ngram),
        max_length=limits,
        patience=patience,
        beginnings=[Beginning(prefix) for prefix in prefixes],
    )
    for src, limit, prefix, found in zip(srcs, limits, prefixes, ours, strict=True):
        theirs = oracle.beam_search(
            model.next_log_probs,
            src,
            beam=beam,
            max_length=limit,
            alpha=alpha,
            n_best=n_best,
            patience=patience,
            forced=prefix,
            no_repeat_ngram=ngram,
        )
        same(found, theirs)


class Wide(StandIn):
    """A stand-in with a larger vocabulary, whose likely tokens are spread over several chunks."""

    def __init__(self, model: StandIn, n_tokens: int) -> None:
        self.model, self.n_tokens, self.calls = model, n_tokens, 0
        generator = torch.Generator().manual_seed(len(model.table[0]))
        self.place = torch.cat(
            [torch.arange(4), 4 + torch.randperm(n_tokens - 4, generator=generator)[:56].sort().values]
        )
        self.back = torch.zeros(n_tokens, dtype=torch.long)
        self.back[self.place] = torch.arange(60)

    def of_source(self, src: Tensor) -> Tensor:
        return self.model.of_source(src)

    def logits_of(self, src: Tensor, history: Tensor) -> Tensor:
        known = torch.full((len(history), self.n_tokens), -9.0)
        known += torch.arange(self.n_tokens) * 1e-3  # no ties
        known[:, self.place] = self.model.logits_of(src, self.back[history])
        return known


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 1.5])
@pytest.mark.parametrize("seed", range(6))
def test_a_wide_beam_finds_the_exhaustive_best(seed: int, alpha: float) -> None:
    n_tokens, max_length = 7, 4
    model = StandIn(n_tokens, seed=seed)
    srcs = sources(3, 1, 2, seed=seed, n_tokens=2)
    ours = beam_search(
        model,
        pad(srcs),
        DecodingOptions(beam=3**max_length + 40, n_best=40, length_penalty=alpha),
        max_length=max_length,
    )
    for src, found in zip(srcs, ours, strict=True):
        every = oracle.all_outputs(model.next_log_probs, src, max_length=max_length, alpha=alpha)
        assert len(every) == sum(3**n for n in range(max_length))
        assert [h.ids for h in found if h.finished] == [one[0] for one in every[: len(found)]]
        assert found[0].score == pytest.approx(every[0][2], abs=1e-5)


def test_infinite_patience_never_finds_a_worse_best_hypothesis() -> None:
    """Compared with patience 1 and a narrow beam; sometimes it finds a better one."""
    better = 0
    for seed in range(20):
        model, src = StandIn(9, seed=seed, end=1.0), pad(sources(3, 2, seed=seed))
        one, all_ = (beam_search(model, src, DecodingOptions(beam=3), max_length=12, patience=p) for p in (1.0, INF))
        for first, best in zip(one, all_, strict=True):
            assert best[0].score >= first[0].score - 1e-6
            better += best[0].score > first[0].score + 1e-6
    assert better > 0


def test_the_bound_on_scores_saves_steps_without_changing_results() -> None:
    saved = 0
    for seed in range(10):
        model, src = StandIn(9, seed=seed, end=4.0), pad(sources(3, seed=seed))
        stopped = beam_search(model, src, DecodingOptions(beam=4, length_penalty=0.0), max_length=30, patience=INF)
        saved += model.calls < 30
        theirs = oracle.beam_search(
            model.next_log_probs, sources(3, seed=seed)[0], beam=4, max_length=30, alpha=0.0, patience=INF, n_best=4
        )
        same(stopped[0], theirs[:1])
    assert saved == 10


def test_beam_one_is_greedy() -> None:
    for seed in range(10):
        model = StandIn(9, seed=seed)
        for src in sources(1, 4, seed=seed):
            ids: tuple[int, ...] = ()
            total = 0.0
            while len(ids) < 12:
                known = model.next_log_probs(src, ids)
                known[PAD] = known[UNK] = known[BOS] = -INF
                token = max(range(9), key=known.__getitem__)
                total += known[token]
                if token == EOS:
                    break
                ids += (token,)
            (found,) = beam_search(model, pad([src]), DecodingOptions(beam=1), max_length=12)[0]
            assert found.ids == ids
            assert found.finished == (len(ids) < 12)
            assert found.log_prob == pytest.approx(total, abs=1e-4)


def test_cut_off_outputs_are_marked_and_follow_finished_ones() -> None:
    model = StandIn(9, end=-30.0)
    (found,) = beam_search(model, pad(sources(3)), DecodingOptions(beam=3, n_best=3), max_length=5)
    assert [h.finished for h in found] == [False] * 3
    assert [len(h.ids) for h in found] == [5] * 3
    model.table[:, :, 5, EOS] = 9.0  # after token 5 the end is certain; otherwise it never comes
    (found,) = beam_search(model, pad(sources(3)), DecodingOptions(beam=9, n_best=9), max_length=4, patience=INF)
    finished = [h.finished for h in found]
    assert True in finished and False in finished
    assert finished == sorted(finished, reverse=True)


@pytest.mark.parametrize("beam", [1, 4])
def test_one_token(beam: int) -> None:
    model = StandIn(9)
    (found,) = beam_search(model, torch.tensor([[EOS]]), DecodingOptions(beam=beam), max_length=1)
    best = max((p, i) for i, p in enumerate(model.next_log_probs([EOS], ())) if i not in (PAD, BOS))
    if found[0].finished:
        assert found[0].ids == ()
    else:
        assert found[0].ids == (best[1],)


def test_pad_and_bos_are_never_generated() -> None:
    model = StandIn(9)
    model.table[..., PAD] += 9
    model.table[..., BOS] += 9
    for found in beam_search(model, pad(sources(3, 1, 5)), DecodingOptions(beam=3, n_best=3), max_length=6):
        for h in found:
            assert not {PAD, BOS, EOS} & set(h.ids)


@pytest.mark.parametrize("wanted", range(4))
def test_a_search_ends_when_no_open_sentence_is_wanted(wanted: int) -> None:
    """Those that are done by then have their results."""
    model, src, limits = StandIn(9, end=-9.0), pad(sources(3, 3, 3, 3)), [2, 4, 6, 30]
    whole = beam_search(model, src, DecodingOptions(beam=2), max_length=limits)
    part = beam_search(model, src, DecodingOptions(beam=2), max_length=limits, is_wanted=lambda place: place == wanted)
    assert part == [found if place <= wanted else [] for place, found in enumerate(whole)]


def test_finished_sentences_leave_the_batch() -> None:
    """A long sentence costs no steps of the others."""
    seen: list[int] = []

    class Counting(StandIn):
        def advance(self, ids: Tensor, state: State) -> Tensor:
            seen.append(len(ids))
            return super().advance(ids, state)

    model = Counting(9, end=8.0)
    beam_search(
        model,
        pad(sources(*[1] * 15, 2)),
        DecodingOptions(beam=2, length_penalty=5.0),
        max_length=[2] * 15 + [40],
        patience=INF,
    )
    assert seen[0] == 32
    assert seen[2:] == [2] * 38


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"options": DecodingOptions(n_best=6)}, "n_best = 6"),
        ({"patience": 0.0}, "patience 0.0"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        beam_search(StandIn(9), pad(sources(3)), **{"max_length": 5} | options)
