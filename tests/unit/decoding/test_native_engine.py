"""The native library against PyTorch: random models, every instruction set of this CPU, any batch, any input."""

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from native_engines import (
    N_TOKENS,
    TRANSLATORS,
    engine_for,
    engine_of,
    instruction_sets,
    needs_library,
    pytorch_of,
    translator_settings,
)
from oracle.stand_in import untrained
from transduce.config.decoding import DecodingOptions
from transduce.data.store import Example
from transduce.decoding.engine import DecodingInput, Engine, Hypothesis
from transduce.decoding.native_model import PRECISIONS, NativePrecision, why_not
from transduce.decoding.torch_engine import TorchEngine
from transduce.errors import SettingsError
from transduce.text.special import PLACEHOLDER_IDS, UNK

pytestmark = needs_library


@cache
def sources(n: int = 40, *, longest: int = 40, n_tokens: int = N_TOKENS, seed: int = 0) -> list[DecodingInput]:
    generator = random.Random(seed)
    lengths = [1, 15, 16, longest, *(generator.randint(1, longest) for _ in range(n - 4))]
    ids = [[generator.randrange(4, n_tokens) for _ in range(length)] for length in lengths]
    return [DecodingInput((i,), row, generator.choice([1, 2, len(row) + 4, 24])) for i, row in enumerate(ids)]


def assert_same(ours: list[Hypothesis], theirs: list[Hypothesis], *, tolerance: float = 1e-4) -> None:
    """Equal except where scores tie up to rounding: then hypotheses may be in another order, or be others."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.score == pytest.approx(other.score, abs=tolerance)
        if one.ids == other.ids:
            assert one.log_prob == pytest.approx(other.log_prob, abs=tolerance * (len(one.ids) + 1))
            assert one.finished == other.finished


def attention(found: list[list[Hypothesis]]) -> list[bytes]:
    """That of the guided head, as bits."""
    return [b"" if one.attention is None else one.attention.tobytes() for hypotheses in found for one in hypotheses]


def random_settings(seed: int) -> dict[str, Any]:
    choose = random.Random(seed).choice
    heads, kv = choose([(1, 1), (2, 1), (4, 2), (3, 3), (6, 2), (8, 8)])
    feed_forward = choose(["plain", "gated", "conv"])
    values: dict[str, Any] = {
        "n_heads": heads,
        "n_kv_heads": kv,
        "d_model": heads * choose([2, 6, 8, 16, 20, 32, 64]),
        "d_ff": choose([1, 17, 64, 130]),
        "n_encoder_layers": choose([0, 1, 3]),
        "n_decoder_layers": choose([1, 2]),
        "residual": choose(["pre", "post"]),
        "one_end": choose([False, True]),
        "norm": choose(["layer", "rms"]),
        "positions": choose(["none", "sinusoidal", "sinusoidal_halves", "sinusoidal_fairseq", "learned", "rotary"]),
        "activation": choose(["relu", "gelu", "gelu_tanh", "silu"]),
        "feed_forward": feed_forward,
        "bias": choose([True, False]),
        "tie": choose(["three_way", "two_way", "inputs", "none"]),
        "output_bias": choose([True, False]),
        "embedding_norm": choose([True, False]),
        "scale_embeddings": choose([True, False]),
    }
    if heads == kv and choose([True, False]):
        values["projection"] = "shared"
    values["decoder_self"] = choose(["attention", "ssru"])
    # Of two numbers, a layer norm makes 1 and -1: tokens tie exactly if embeddings have no positions.
    if values["decoder_self"] == "attention" and values["d_model"] > 2 and choose([True, False]):
        values["positions"] = choose(["t5", "alibi"])
    if "projection" not in values and choose([True, False]):
        d_keys = [2, 10, 24] if values["positions"] == "rotary" else [3, 16, 21]
        values |= {"d_key": choose(d_keys), "d_value": choose([1, 16, 18])}
    if values["positions"] == "sinusoidal_fairseq":
        values["positions"] = choose(["sinusoidal_fairseq", "sinusoidal_marian"])
    return values


@pytest.mark.parametrize("seed", range(24))
def test_random_models_give_the_hypotheses_of_pytorch(seed: int) -> None:
    chosen = random.Random(1000 + seed)
    settings = translator_settings(**random_settings(seed))
    n_tokens = chosen.choice([24, 100, 700, 1500])
    model = untrained(settings, n_src=n_tokens, n_tgt=n_tokens, seed=seed)
    beam = chosen.choice([1, 1, 2, 5, 9])
    options = DecodingOptions(
        beam=beam,
        n_best=chosen.randint(1, beam),
        length_penalty=chosen.choice([0.0, 0.6, 1.0, 1.5]),
        no_repeat_ngram=chosen.choice([0, 0, 1, 2, 3]),
    )
    asked = sources(12, longest=chosen.choice([17, 40]), n_tokens=n_tokens, seed=seed)
    ours = engine_for(model, settings, n_threads=1).translate(asked, options)
    theirs = TorchEngine(model).translate(asked, options)
    same = 0
    for one, other in zip(ours, theirs, strict=True):
        # These random weights amplify rounding: PyTorch's float32 is up to 5e-4 from float64 here.
        assert_same(one, other, tolerance=5e-4)
        same += [h.ids for h in one] == [h.ids for h in other]
    assert same >= len(asked) - 1


@pytest.mark.parametrize("seed", range(12))
def test_placeholders_occur_exactly_as_often_as_in_the_source(seed: int) -> None:
    chosen = random.Random(seed)
    settings = translator_settings(**random_settings(seed))
    n_tokens = chosen.choice([40, 700])
    model = untrained(settings, n_src=n_tokens, n_tgt=n_tokens, seed=seed)
    beam, sampled = chosen.choice([1, 2, 5]), seed % 4 == 3
    options = DecodingOptions(n_best=min(beam, 2), no_repeat_ngram=chosen.choice([0, 2]), scores=seed % 2 == 0)
    options = options.over(DecodingOptions(beam=beam)) if not sampled else DecodingOptions(n_best=2, sample=True)
    asked = [
        replace(source, limit=60, copies=tuple(chosen.choices(PLACEHOLDER_IDS, k=chosen.choice([0, 1, 2, 5]))))
        for source in sources(12, longest=17, n_tokens=n_tokens, seed=seed)
    ]
    ours = engine_for(model, settings, n_threads=1, placeholders=True).translate(asked, options)
    theirs = TorchEngine(model).translate(asked, options)
    for source, *engines in zip(asked, ours, theirs, strict=True):
        for hypothesis in (hypothesis for hypotheses in engines for hypothesis in hypotheses):
            written = [i for i in hypothesis.ids if i in PLACEHOLDER_IDS]
            assert not hypothesis.finished or sorted(written) == sorted(source.copies or ())
            assert not Counter(written) - Counter(source.copies) and UNK not in hypothesis.ids
    if not sampled:
        assert (
            sum([h.ids for h in one] == [h.ids for h in other] for one, other in zip(ours, theirs, strict=True)) >= 10
        )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("beam", [1, 2, 5])
@pytest.mark.parametrize("name", TRANSLATORS)
def test_a_sentence_is_bit_identical_alone_and_in_any_batch(name: str, beam: int, precision: NativePrecision) -> None:
    options = DecodingOptions(beam=beam, n_best=min(beam, 2))
    one, two = (engine_of(name, n_threads=n, precision=precision) for n in (1, 2))
    asked = sources()
    alone = [one.translate([source], options)[0] for source in asked]
    assert one.translate(asked, options) == two.translate(asked, options) == alone
    assert attention(two.translate(asked, options)) == attention(alone)
    order = random.Random(beam).sample(range(len(asked)), len(asked))
    for engine in (one, two):
        for size in (3, 17):
            found = [
                hypotheses
                for start in range(0, len(order), size)
                for hypotheses in engine.translate([asked[i] for i in order[start : start + size]], options)
            ]
            assert found == [alone[i] for i in order]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", TRANSLATORS)
def test_greedy_search_without_scores_finds_the_same_tokens(
    name: str, precision: NativePrecision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It screens the vocabulary by int8 bounds, on some CPUs only that of a few sentences: no best token is lost."""
    for isa in instruction_sets()[0 if precision == "float32" else -1 :]:
        monkeypatch.setenv("TRANSDUCE_NATIVE_ISA", isa)
        engine = engine_of(name, n_threads=2, precision=precision)
        fast = engine.translate(sources(), DecodingOptions(beam=1, scores=False))
        scored = engine.translate(sources(), DecodingOptions(beam=1))
        assert [h[0].ids for h in fast] == [h[0].ids for h in scored]
        assert {h[0].score for h in fast} == {0.0}
        assert fast == [engine.translate([source], DecodingOptions(beam=1, scores=False))[0] for source in sources()]


@pytest.mark.parametrize("name", TRANSLATORS)
def test_every_instruction_set_gives_the_hypotheses_of_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    isas = instruction_sets()
    eights: dict[str, list[list[Hypothesis]]] = {}
    for beam in (1, 4):
        options = DecodingOptions(beam=beam, n_best=beam)
        theirs = pytorch_of(name).translate(sources(), options)
        for isa in isas:
            monkeypatch.setenv("TRANSDUCE_NATIVE_ISA", isa)
            for precision in ("float32", "float32-fast"):
                ours = engine_of(name, precision=precision).translate(sources(), options)  # type: ignore[arg-type]
                for one, other in zip(ours, theirs, strict=True):
                    assert_same(one, other, tolerance=1e-4 if precision == "float32" else 2e-3)
            eights[isa] = engine_of(name, precision="int8").translate(sources(), options)
        for width in (["avx2", "avx_vnni"], ["avx512", "avx512_vnni", "amx"]):
            same = [eights[isa] for isa in width if isa in eights]
            assert same == same[:1] * len(same), "int8 has the same bits"
    differences = [abs(one[0].score - other[0].score) for one, other in zip(eights[isas[-1]], theirs, strict=True)]
    assert sum(differences) / len(differences) < 0.2


@pytest.mark.parametrize(
    "options",
    [DecodingOptions(beam=1, scores=False), DecodingOptions(beam=4, n_best=4), DecodingOptions(sample=True, n_best=3)],
)
@pytest.mark.parametrize("name", TRANSLATORS)
def test_the_guided_head_s_attention_of_a_search_is_that_of_pytorch(
    name: str, options: DecodingOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = translator_settings(**TRANSLATORS[name]).model.guided_head
    asked = [one if options.sample else replace(one, prefix=(9, 7)[: one.limit]) for one in sources()]
    for isa, precision in [*((isa, "float32") for isa in instruction_sets()), (instruction_sets()[-1], "int8")]:
        monkeypatch.setenv("TRANSDUCE_NATIVE_ISA", isa)
        engine = engine_of(name, precision=precision)  # type: ignore[arg-type]
        found = engine.translate(asked, options)
        outputs = [(source, one) for source, hypotheses in zip(asked, found, strict=True) for one in hypotheses]
        exact = pytorch_of(name) if precision == "float32" else engine
        weights = exact.attention([Example(source.ids, one.ids) for source, one in outputs], [head])
        for (_, one), rows in zip(outputs, weights, strict=True):
            n_read = len(one.ids) - (not one.finished)
            if not one.ids:
                continue
            assert one.attention is not None and one.attention.shape == (len(one.ids), rows.shape[2])
            atol = 2e-4 if precision == "float32" else 0.05  # rounding may change an int8 number
            np.testing.assert_allclose(one.attention[:n_read], rows[0, 1 : n_read + 1], atol=atol)
            assert not one.attention[n_read:].any()


@pytest.mark.parametrize(
    "options", [DecodingOptions(beam=1), DecodingOptions(beam=5, n_best=3), DecodingOptions(sample=True, n_best=2)]
)
def test_unscored_tokens_of_a_prefix_count_in_the_length_only(options: DecodingOptions) -> None:
    """A probability of 1 for the first token of the output: what transformers' `forced_bos_token_id` does."""
    name = next(iter(TRANSLATORS))
    asked = [replace(one, prefix=(9, 7)[: one.limit], n_unscored=1) for one in sources(12)]
    known = {}
    for engine in (engine_of(name), pytorch_of(name)):
        known[engine] = engine.translate(asked, options)
        for source, hypotheses in zip(asked, known[engine], strict=True):
            for one in hypotheses:
                (scores,) = pytorch_of(name).score([Example(source.ids, one.ids)])
                counted = scores[1 : len(one.ids) + one.finished]
                assert one.log_prob == pytest.approx(sum(counted), abs=1e-3)
                penalty = 1 if options.sample else options.length_penalty
                length = len(one.ids) + one.finished
                assert one.score == pytest.approx(one.log_prob / length**penalty, abs=1e-4)
    for ours, theirs in zip(*known.values(), strict=True):
        assert_same(ours, theirs)


def test_long_searches_keep_no_attention() -> None:
    source = DecodingInput((0,), list(range(4, 600)), 60)
    for beam, is_kept in ((1, True), (512, False)):
        (found,) = engine_of("ssru").translate([source], DecodingOptions(beam=beam))
        assert (found[0].attention is not None) == is_kept


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSDUCE_NATIVE_ISA", "avx3")
    with pytest.raises(SettingsError, match="TRANSDUCE_NATIVE_ISA = avx3: this CPU offers portable"):
        engine_of("paper")


def test_what_is_not_supported_has_a_reason() -> None:
    for name, value in [("positions", "shaw"), ("decoder_pattern", "local"), ("kernel_size", 3)]:
        model = {name: value} | ({"feed_forward": "conv"} if name == "kernel_size" else {})
        found = why_not(translator_settings(**model).model)
        assert found and found.startswith("model.")


def test_padding_and_long_sentences_are_refused() -> None:
    engine, options = engine_of("odd"), DecodingOptions(beam=2)
    assert isinstance(engine, Engine)
    for unusual, message in (
        (DecodingInput((0,), [5, 0, 7], 9), "padding"),
        (DecodingInput((1,), [10, 6], 91), "learned positions"),
        (DecodingInput((2,), [5] * 90, 9), "learned positions"),
        (DecodingInput((3,), [5] * 70_000, 9), "from 1 to 65536 tokens"),
    ):
        with pytest.raises(SettingsError, match=message):
            engine.translate([unusual], options)
    assert engine.translate([], options) == []


@pytest.mark.parametrize("odd", [N_TOKENS, -1, 1 << 31, 1 << 40, -(1 << 40)])
def test_ids_outside_the_vocabulary_are_refused(odd: int) -> None:
    engine = engine_of("paper")
    for source in (DecodingInput((0,), [5, odd], 9), DecodingInput((0,), [5], 9, (odd,))):
        with pytest.raises(SettingsError, match="token"):
            engine.translate([source], DecodingOptions())
    with pytest.raises(SettingsError, match="token"):
        engine.score([Example([5, odd], [5])])


def test_weights_that_are_not_numbers_give_no_hypothesis() -> None:
    settings = translator_settings()
    model = untrained(settings, n_src=20, n_tgt=20)
    next(iter(model.decoder.parameters())).data.fill_(torch.nan)
    for precision in PRECISIONS:
        engine = engine_for(model, settings, precision=precision)
        for beam in (1, 3):
            found = engine.translate([DecodingInput((0,), [5, 6], 9)], DecodingOptions(beam=beam))
            assert all(isinstance(hypotheses, list) for hypotheses in found)
