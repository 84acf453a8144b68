"""Samples of the native library: the tokens that PyTorch draws from the same seeds, in any company."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from torch import nn

from native_engines import engine_for
from oracle.search import repeats
from oracle.stand_in import untrained
from transduce.config.decoding import DecodingOptions
from transduce.config.settings import Settings
from transduce.decoding.engine import DecodingInput, Hypothesis
from transduce.decoding.native_library import load_library
from transduce.decoding.torch_engine import TorchEngine

pytestmark = pytest.mark.skipif(isinstance(load_library(), str), reason="the native library is not built")
N_TOKENS = 300
SAMPLINGS = [
    DecodingOptions(sample=True),
    DecodingOptions(sample=True, temperature=0),
    DecodingOptions(sample=True, temperature=0.7, top_k=20),
    DecodingOptions(sample=True, temperature=1.3, top_p=0.9),
    DecodingOptions(sample=True, top_k=50, top_p=0.8),
    DecodingOptions(sample=True, temperature=1e-9, top_k=1),
    DecodingOptions(sample=True, temperature=0, no_repeat_ngram=2),
]
GPTS: dict[str, dict[str, Any]] = {
    "gpt2": {"positions": "learned", "max_positions": 120, "one_end": True, "activation": "gelu_tanh"},
    "rotary": {"positions": "rotary", "n_heads": 8, "n_kv_heads": 2, "norm": "rms", "bias": False, "tie": "none"},
}


@cache
def model_of(name: str) -> tuple[Settings, nn.Module]:
    sizes: dict[str, Any] = {"d_model": 64, "d_ff": 96, "n_heads": 2, "n_decoder_layers": 2}
    if name in GPTS:
        sizes |= {"kind": "gpt", "residual": "pre"} | GPTS[name]
    settings = Settings.from_mapping({"task": "causal" if name in GPTS else "translation", "model": sizes})
    return settings, untrained(settings, n_src=N_TOKENS, n_tgt=N_TOKENS)


@cache
def sources(n: int, *, length: int | None = None, limit: int = 12) -> list[DecodingInput]:
    pick = random.Random(n)
    sizes = [length or pick.randint(1, 30) for _ in range(n)]
    return [DecodingInput((i, 7), [pick.randrange(4, N_TOKENS) for _ in range(m)], limit) for i, m in enumerate(sizes)]


def assert_nearly_all_equal(ours: list[Hypothesis], theirs: list[Hypothesis]) -> None:
    """Rounding may put a number on the other side of a boundary."""
    assert len(ours) == len(theirs)
    same = [(one, other) for one, other in zip(ours, theirs, strict=True) if one.ids == other.ids]
    assert len(same) >= 0.97 * len(ours)
    for one, other in same:
        assert one.finished == other.finished
        assert one.log_prob == pytest.approx(other.log_prob, abs=2e-3)
        assert one.score == pytest.approx(other.score, abs=2e-4)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_samples_of_translations_are_those_of_pytorch(sampling: DecodingOptions) -> None:
    settings, model = model_of("translator")
    options = sampling.model_copy(update={"n_best": 3, "seed": 5})
    ours = engine_for(model, settings).translate(sources(40), options)
    theirs = TorchEngine(model).translate(sources(40), options)
    assert_nearly_all_equal(*([one for found in both for one in found] for both in (ours, theirs)))


@pytest.mark.parametrize("length", [1, 16, 33, 100])
@pytest.mark.parametrize("name", GPTS)
def test_generated_text_is_that_of_pytorch(name: str, length: int) -> None:
    settings, model = model_of(name)
    prompts = sources(40, length=length)
    for sampling in (SAMPLINGS[0], SAMPLINGS[1], SAMPLINGS[4], SAMPLINGS[6]):
        ours = engine_for(model, settings).sample(prompts, sampling)
        assert_nearly_all_equal(ours, TorchEngine(model).sample(prompts, sampling))
        if n := sampling.no_repeat_ngram:
            for prompt, one in zip(prompts, ours, strict=True):
                ids = (*prompt.ids, *one.ids)
                assert not any(repeats(ids[:end], n) for end in range(length + 1, len(ids) + 1))


@pytest.mark.parametrize("precision", ["float32", "float32-fast", "int8"])
def test_a_sample_is_bit_identical_alone_and_in_any_batch(precision: Any) -> None:
    for name in ("translator", *GPTS):
        one, two = (engine_for(*reversed(model_of(name)), precision=precision, n_threads=n) for n in (1, 2))  # type: ignore[arg-type]
        for sampling in (SAMPLINGS[0], SAMPLINGS[4]):
            if name == "translator":
                options = sampling.model_copy(update={"n_best": 2})
                alone = [one.translate([source], options)[0] for source in sources(20)]
                assert one.translate(sources(20), options) == two.translate(sources(20), options) == alone
            else:
                each = [one.sample([source], sampling)[0] for source in sources(20)]
                assert two.sample(sources(20), sampling) == each  # prompts of different lengths


@pytest.mark.parametrize("name", GPTS)
def test_streamed_tokens_are_those_of_the_text(name: str) -> None:
    settings, model = model_of(name)
    engine, seen = engine_for(model, settings), list[int]()
    (found,) = engine.sample(
        sources(1, limit=60),
        DecodingOptions(sample=True),
        on_step=lambda places, tokens: seen.extend(tokens[0]),
    )
    assert tuple(seen) == found.ids and [found] == engine.sample(
        sources(1, limit=60),
        DecodingOptions(sample=True),
    )


def test_weights_that_are_not_numbers_end_a_text() -> None:
    settings = Settings.from_mapping({"task": "causal", "model": {"kind": "gpt", "d_model": 32, "n_heads": 2}})
    model = untrained(settings, n_src=20, n_tgt=20)
    next(iter(model.decoder.parameters())).data.fill_(float("nan"))
    (found,) = engine_for(model, settings).sample(
        [DecodingInput((0,), [5, 6], 9)],
        DecodingOptions(sample=True),
    )
    assert found.ids == ()
