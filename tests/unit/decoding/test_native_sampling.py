"""Samples of the native library: the tokens that PyTorch draws from the same seeds, in any company."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from functools import cache

import pytest
import torch

from native_engines import GPTS, N_TOKENS, engine_for, engine_of, needs_library, pytorch_of, translator_settings
from oracle.search import repeats
from oracle.stand_in import untrained
from transduce.config.decoding import DecodingOptions
from transduce.config.settings import Settings
from transduce.decoding.engine import DecodingInput, Hypothesis
from transduce.decoding.native_model import PRECISIONS, NativePrecision
from transduce.decoding.torch_engine import TorchEngine
from transduce.text.special import EOS, PLACEHOLDER_IDS

pytestmark = needs_library
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


@pytest.mark.parametrize("name", GPTS)
def test_streamed_tokens_are_those_of_the_texts(name: str) -> None:
    engine, seen, options = engine_of(name), defaultdict[int, list[int]](list), DecodingOptions(sample=True)
    asked = sources(3, limit=60)
    found = engine.translate(asked, options, on_token=lambda place, token: seen[place].append(token))
    assert [tuple(seen[place]) for place in range(3)] == [one.ids for (one,) in found]
    assert found == engine.translate(asked, options)


def test_weights_that_are_not_numbers_end_a_text() -> None:
    settings = Settings.from_mapping({"task": "causal", "model": {"kind": "gpt", "d_model": 32, "n_heads": 2}})
    model = untrained(settings, n_src=20, n_tgt=20)
    next(iter(model.decoder.parameters())).data.fill_(float("nan"))
    asked = [DecodingInput((0,), [5, 6], 9)]
    ((found,),) = engine_for(model, settings).translate(asked, DecodingOptions(sample=True))
    assert found.ids == ()
