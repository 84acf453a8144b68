"""Scores and samples of the native library against PyTorch: random models, any batch, any input."""

import os
import random
import signal
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from attentions import attention_maps
from native_engines import (
    GPTS,
    N_TOKENS,
    engine_for,
    engine_of,
    model_of,
    needs_library,
    pytorch_of,
    translator_settings,
)
from oracle.search import repeats
from oracle.stand_in import untrained
from transduce.config.decoding import DecodingOptions
from transduce.config.settings import Settings
from transduce.data.batch import collate
from transduce.data.store import Example, RowExample
from transduce.decoding.engine import DecodingInput, Hypothesis
from transduce.decoding.native_model import PRECISIONS, NativePrecision
from transduce.decoding.torch_engine import TorchEngine
from transduce.errors import SettingsError
from transduce.kernels.library import instruction_set
from transduce.text.special import BOS, EOS, PAD, PLACEHOLDER_IDS

pytestmark = needs_library
SCORED = ("paper", "odd", "ssru", "t5")


@cache
def pairs(n: int = 30, *, longest: int = 80) -> list[Example]:
    pick = random.Random(2)
    lengths = [(0, 0), (0, 5), (5, 0), (1, 1), (16, 15), (15, 16), (longest, longest)]
    lengths += [(pick.randint(1, 40), pick.randint(1, 40)) for _ in range(n)]
    return [Example(*([pick.randrange(4, N_TOKENS) for _ in range(m)] for m in both)) for both in lengths]


@cache
def rows(n: int = 20, *, longest: int = 150) -> list[RowExample]:
    pick = random.Random(3)
    found = []
    for length in [1, 2, 16, 17, longest, *(pick.randint(1, longest) for _ in range(n))]:
        ids = [pick.choice([PAD, BOS, EOS, *[pick.randrange(4, N_TOKENS)] * 20]) for _ in range(length + 1)]
        found.append(RowExample(np.array(ids[:-1]), np.array([PAD if i == BOS else i for i in ids[1:]])))
    return found


def assert_close(ours: list[list[float]], theirs: list[list[float]], *, tolerance: float) -> None:
    assert [len(row) for row in ours] == [len(row) for row in theirs]
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 2e-4), ("float32-fast", 5e-3), ("int8", 1.5)])
@pytest.mark.parametrize("name", SCORED)
def test_scores_are_those_of_pytorch(name: str, precision: NativePrecision, tolerance: float) -> None:
    ours = engine_of(name, precision=precision).score(pairs())
    assert_close(ours, pytorch_of(name).score(pairs()), tolerance=tolerance)


def test_biases_of_long_distances_are_those_of_pytorch() -> None:
    """T5's buckets end at a distance of 128, in both directions."""
    long = [pair for pair in pairs(0, longest=300) if len(pair.src) == 300]
    assert long and len(long[0].tgt) == 300
    assert_close(engine_of("t5").score(long), pytorch_of("t5").score(long), tolerance=2e-4)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("name", GPTS)
def test_scores_of_running_text_are_those_of_pytorch(name: str, separate: bool) -> None:
    ours = engine_of(name).score_rows(rows(), separate=separate)
    assert_close(ours, pytorch_of(name).score_rows(rows(), separate=separate), tolerance=2e-4)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_score_is_bit_identical_alone_and_in_any_batch(precision: NativePrecision) -> None:
    for name in (*SCORED, *GPTS):
        one, two = (engine_of(name, precision=precision, n_threads=n) for n in (1, 2))
        if name in SCORED:
            many = pairs() * 4
            alone = [one.score([pair])[0] for pair in pairs()] * 4
            assert one.score(many) == two.score(many) == alone
        else:
            alone = [one.score_rows([row], separate=True)[0] for row in rows()] * 2
            assert two.score_rows(rows() * 2, separate=True) == alone
    assert one.score([]) == []


def test_a_forked_process_scores_with_threads_of_its_own() -> None:
    engine, many = engine_of("paper", n_threads=2), pairs() * 8  # more tokens than one thread takes
    expected = engine.score(many)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)  # ends a child that waits for threads which it does not have
            code = 0 if engine.score(many) == expected else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.score(many) == expected


def test_int8_scores_have_the_same_bits_with_amx_and_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    if instruction_set() != "amx":
        pytest.skip("this CPU has no AMX")
    for name in SCORED:
        scores = []
        for isa in ("amx", "avx512_vnni", "avx512"):
            monkeypatch.setenv("TRANSDUCE_NATIVE_ISA", isa)
            scores.append(engine_of(name, precision="int8").score(pairs()))
        assert scores[0] == scores[1] == scores[2]


def test_padding_and_long_sentences_are_refused() -> None:
    engine = engine_of("odd")
    for unusual, message in (
        (Example([5, PAD, 6], [7]), "padding"),
        (Example([5], [7, PAD, 8]), "padding"),
        (Example([5] * 90, [6]), "too long"),
        (Example([5], [6] * 90), "too long"),
    ):
        for score in (engine.score, lambda pairs: engine.attention(pairs, [(0, 1)])):
            with pytest.raises(SettingsError, match=message):
                score([unusual])


@pytest.mark.parametrize("name", SCORED)
def test_attention_is_that_of_pytorch(name: str) -> None:
    model, settings = model_of(name)
    heads = [(1, 0), (0, 1), (1, settings.model.n_heads - 1), (1, 0)]
    for pair, weights in zip(pairs(), engine_of(name).attention(pairs(), heads), strict=True):
        batch = collate([pair])
        recorded = attention_maps(model, batch.src, batch.tgt_in)["cross"]
        assert weights.shape == (len(heads), len(pair.tgt) + 1, len(pair.src) + 1)
        for one, (layer, head) in zip(weights, heads, strict=True):
            np.testing.assert_allclose(one, recorded[layer][head], atol=1e-4)


def test_heads_that_the_model_lacks_are_refused() -> None:
    """tests/unit/decoding/test_native_fuzz.py has other hostile requests."""
    for heads in ([(3, 0)], [(0, 6)], [(-1, 0)]):
        with pytest.raises(SettingsError, match="heads"):
            engine_of("odd").attention(pairs(), heads)


SAMPLINGS = [
    DecodingOptions(sample=True),
    DecodingOptions(sample=True, temperature=0),
    DecodingOptions(sample=True, temperature=0.7, top_k=20),
    DecodingOptions(sample=True, temperature=1.3, top_p=0.9),
    DecodingOptions(sample=True, top_k=50, top_p=0.8),
    DecodingOptions(sample=True, temperature=1e-9, top_k=1),
    DecodingOptions(sample=True, temperature=0, no_repeat_ngram=2),
]


@cache
def sources(n: int, *, length: int | None = None, limit: int = 12) -> list[DecodingInput]:
    pick = random.Random(n)
    sizes = [length or pick.randint(1, 30) for _ in range(n)]
    return [DecodingInput((i, 7), [pick.randrange(4, N_TOKENS) for _ in range(m)], limit) for i, m in enumerate(sizes)]


def assert_nearly_all_equal(ours: list[list[Hypothesis]], theirs: list[list[Hypothesis]]) -> None:
    """Rounding may put a number on the other side of a boundary."""
    both = [pair for drawn in zip(ours, theirs, strict=True) for pair in zip(*drawn, strict=True)]
    same = [(one, other) for one, other in both if one.ids == other.ids]
    assert len(same) >= 0.97 * len(both)
    for one, other in same:
        assert one.finished == other.finished
        assert one.log_prob == pytest.approx(other.log_prob, abs=2e-3)
        assert one.score == pytest.approx(other.score, abs=2e-4)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_samples_of_translations_are_those_of_pytorch(sampling: DecodingOptions) -> None:
    options = sampling.model_copy(update={"n_best": 3, "seed": 5})
    ours, theirs = (engine.translate(sources(40), options) for engine in (engine_of("paper"), pytorch_of("paper")))
    assert_nearly_all_equal(ours, theirs)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_samples_with_placeholders_are_those_of_pytorch(sampling: DecodingOptions) -> None:
    settings, pick = translator_settings(), random.Random(3)
    model = untrained(settings, n_src=N_TOKENS, n_tgt=N_TOKENS)
    with torch.no_grad():
        model.get_parameter("tgt_embedding.table.weight")[EOS] *= 7  # often nearly certain
    asked = [replace(one, copies=tuple(pick.choices(PLACEHOLDER_IDS, k=2))) for one in sources(40)]
    options = sampling.model_copy(update={"n_best": 2, "seed": 5})
    engines = engine_for(model, settings, placeholders=True), TorchEngine(model)
    ours, theirs = (engine.translate(asked, options) for engine in engines)
    assert_nearly_all_equal(ours, theirs)


@pytest.mark.parametrize("length", [1, 16, 33, 100])
@pytest.mark.parametrize("name", GPTS)
def test_generated_text_is_that_of_pytorch(name: str, length: int) -> None:
    prompts = sources(40, length=length)
    for sampling in (SAMPLINGS[0], SAMPLINGS[1], SAMPLINGS[4], SAMPLINGS[6]):
        ours = engine_of(name).translate(prompts, sampling)
        assert_nearly_all_equal(ours, pytorch_of(name).translate(prompts, sampling))
        if n := sampling.no_repeat_ngram:
            for prompt, (one,) in zip(prompts, ours, strict=True):
                ids = (*prompt.ids, *one.ids)
                assert not any(repeats(ids[:end], n) for end in range(length + 1, len(ids) + 1))


@pytest.mark.parametrize("name", GPTS)
def test_a_prompt_may_contain_padding(name: str) -> None:
    """Text may name the padding of an imported vocabulary; a decoder reads it as any token."""
    prompts = [replace(one, ids=[*one.ids, 0, *one.ids]) for one in sources(20)]
    ours, theirs = (engine.translate(prompts, SAMPLINGS[0]) for engine in (engine_of(name), pytorch_of(name)))
    assert_nearly_all_equal(ours, theirs)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_samples_after_a_prefix_are_those_of_pytorch(sampling: DecodingOptions) -> None:
    options, pick = sampling.model_copy(update={"n_best": 2, "seed": 5}), random.Random(3)
    asked = [
        replace(one, prefix=tuple(pick.choices(range(4, N_TOKENS), k=pick.randrange(one.limit + 1))))
        for one in sources(40)
    ]
    ours, theirs = (engine.translate(asked, options) for engine in (engine_of("paper"), pytorch_of("paper")))
    assert_nearly_all_equal(ours, theirs)
    for one, drawn in zip(asked, ours, strict=True):
        assert all(h.ids[: len(one.prefix)] == one.prefix for h in drawn)
    both = engine_of("paper").translate([asked[0], replace(asked[1], prefix=())], options)
    alone = [engine_of("paper").translate([one], options)[0] for one in (asked[0], replace(asked[1], prefix=()))]
    assert both == alone


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_sample_is_bit_identical_alone_and_in_any_batch(precision: NativePrecision) -> None:
    for name in ("paper", *GPTS):
        one, two = (engine_of(name, precision=precision, n_threads=n) for n in (1, 2))
        for sampling in (SAMPLINGS[0], SAMPLINGS[4]):
            options = sampling.model_copy(update={"n_best": 1 if name in GPTS else 2})
            alone = [one.translate([source], options)[0] for source in sources(20)]
            assert one.translate(sources(20), options) == two.translate(sources(20), options) == alone


def test_weights_that_are_not_numbers_end_a_text() -> None:
    settings = Settings.from_mapping({"task": "causal", "model": {"kind": "gpt", "d_model": 32, "n_heads": 2}})
    model = untrained(settings, n_src=20, n_tgt=20)
    next(iter(model.decoder.parameters())).data.fill_(float("nan"))
    asked = [DecodingInput((0,), [5, 6], 9)]
    ((found,),) = engine_for(model, settings).translate(asked, DecodingOptions(sample=True))
    assert found.ids == ()
