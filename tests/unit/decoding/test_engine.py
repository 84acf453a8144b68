"""Engines get options unchanged and equal lines once; ensembles are the mean of their models' probabilities."""

import math
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import marians
import text_runs
from oracle import cases
from oracle import search as oracle
from oracle.adapter import numpy_weights, options_of, randomize
from oracle.numpy_rnn import Options, hidden_states
from oracle.numpy_transformer import log_softmax, transformer
from oracle.stand_in import untrained
from transduce.config.decoding import DecodingOptions
from transduce.config.settings import Settings
from transduce.data.batch import pad_sources
from transduce.data.store import Example
from transduce.decoding import torch_engine
from transduce.decoding.engine import DecodingInput, Engine, Hypothesis
from transduce.decoding.search import beam_search
from transduce.decoding.torch_engine import Ensemble, TorchEngine, mean_log_probs
from transduce.decoding.translator import Translator
from transduce.errors import SettingsError
from transduce.kernels.library import load_library
from transduce.models.registry import build_model
from transduce.runs.folder import RunFolder
from transduce.text.special import BOS, EOS


@contextmanager
def pytorch_threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Recorder:
    """An engine that copies its sources and records its calls."""

    device = "cpu"

    def __init__(self) -> None:
        self.asked: list[tuple[list[DecodingInput], DecodingOptions]] = []

    def translate(
        self, sources: Sequence[DecodingInput], options: DecodingOptions, **_: object
    ) -> list[list[Hypothesis]]:
        self.asked.append((list(sources), options))
        return [[Hypothesis(tuple(source.ids), -1.0, -1.0)] for source in sources]

    def score(self, *_: object, **__: object) -> list[list[float]]:
        raise AssertionError

    attention = open_batcher = score_rows = pytorch_model = score


def test_the_pytorch_engine_implements_the_protocol(translator: Translator) -> None:
    assert isinstance(translator.engine, Engine) and isinstance(Recorder(), Engine)


def test_options_reach_the_engine_unchanged_and_equal_lines_once(translator: Translator, texts: list[str]) -> None:
    recorder = Recorder()
    other = Translator(recorder, translator.tokenizers)
    lines = [texts[i] for i in (0, 1, 0, 2, 0, 1)]
    options = DecodingOptions(beam=7, length_penalty=0.5)
    found = other.translate(lines, options)
    ((sources, seen),) = recorder.asked
    assert seen == options and seen.model_fields_set == {"beam", "length_penalty"}
    assert [source.key for source in sources] == [(0,), (1,), (3,)]
    assert [t.ids for t in found] == [tuple(other.tokenizers.src.encode(line)) for line in lines]
    other.translate(lines, DecodingOptions(sample=True))
    assert [source.key for source in recorder.asked[1][0]] == [(i,) for i in range(6)]


def test_equal_lines_get_the_same_translation_but_different_samples(tmp_path: Path) -> None:
    translator = Translator.load(marians.make_run(tmp_path / "run"))
    lines = [marians.LINES[i] for i in (0, 5, 0, 0, 7, 5)]
    options = DecodingOptions(beam=2, n_best=2)
    for line, translation in zip(lines, translator.translate(lines, options), strict=True):
        assert translation == translator.translate([line], options)[0]
    drawn = [one.text for one in translator.translate([lines[0]] * 8, DecodingOptions(sample=True))]
    assert len(set(drawn)) > 1


def test_concurrent_calls_agree_and_keep_the_number_of_threads(
    translator: Translator, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads started later have as many PyTorch threads as before."""
    engine = TorchEngine(translator.model)
    fresh = Translator(engine, translator.tokenizers, settings=translator.settings)
    options = DecodingOptions(beam=2, batch_tokens=60, max_length=6)
    with pytorch_threads(2):
        expected = fresh.translate(texts[:12], options)
        alone = fresh.translate(texts[:12], options.model_copy(update={"batch_tokens": 1}))
        assert [t.ids for t in expected] == [t.ids for t in alone]
        workers = engine._workers
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: fresh.translate(texts[:12], options), range(8)))
        assert all(translations == expected for translations in found)
        assert engine._workers is workers is not None, "the threads are made once"
        counts = [torch.get_num_threads()]
        later = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert counts == [2, 2]
        monkeypatch.setattr(torch_engine, "beam_search", None)
        with pytest.raises(TypeError):  # in a thread
            fresh.translate(texts[:12], options)


def test_translate_never_sets_the_number_of_threads(
    translator: Translator, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = DecodingOptions(beam=2, batch_tokens=60, max_length=5)
    with pytorch_threads(2):
        fresh = Translator(TorchEngine(translator.model), translator.tokenizers, settings=translator.settings)
        fresh.translate(texts[:20], options)
        monkeypatch.setattr(torch, "set_num_threads", None)
        fresh.translate(texts[:20], options)
        monkeypatch.undo()


@pytest.mark.parametrize(
    "wrong",
    [
        {"beam": 0},
        {"beam": 513},
        {"n_best": 0},
        {"beam": 2, "n_best": 3},
        {"max_length": 0},
        {"length_penalty": -1.0},
        {"length_penalty": float("nan")},
        {"batch_tokens": 0},
        {"seed": -1},
        {"beam": 2, "sample": True},
        {"temperature": 0.5},
        {"temperature": -1.0, "sample": True},
        {"temperature": math.nan, "sample": True},
        {"top_p": 1.5, "sample": True},
        {"top_k": -1, "sample": True},
    ],
    ids=str,
)
def test_options_out_of_range_or_without_effect_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        DecodingOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="there is no C++ compiler")
def test_the_native_library_loads_where_it_can_be_compiled() -> None:
    """The tests of the library are skipped where it does not load."""
    assert not isinstance(found := load_library(), str), found


N_TOKENS = 300
SIZES = {"d_model": 64, "d_ff": 128, "n_heads": 2, "n_encoder_layers": 1, "n_decoder_layers": 2}
MEMBERS: list[dict[str, Any]] = [
    SIZES,
    {**SIZES, "d_model": 96, "residual": "pre"},
    {"kind": "rnn", "d_hidden": 64},
    *[{"kind": "rnn", "d_hidden": 64, "cell": "gru"}] * 3,  # PyTorch's logsumexp adds five rows in another order
]
LINES = marians.LINES[::9]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models with the same vocabularies: two Transformers and an RNN."""
    folder = tmp_path_factory.mktemp("runs")
    return [
        marians.make_run(folder / "a"),
        marians.make_run(folder / "b", seed=2, d_model=24, residual="pre"),
        marians.make_run(folder / "c", seed=3, kind="rnn", d_hidden=12),
    ]


def in_numpy() -> tuple[Ensemble, oracle.NextLogProbs]:
    """A Transformer and an RNN, and the mean of their probabilities by the equations, in float64."""
    first, of_first = cases.make(seed=4, residual="pre", scale_embeddings=False)
    of_second = cases.settings(kind="rnn", d_hidden=12)
    second = build_model(of_second, n_src=cases.VOCAB, n_tgt=cases.VOCAB).eval()
    randomize(second, seed=5, scale=0.8)
    weights = numpy_weights(first.state_dict(), of_first)
    rnn = {name: tensor.double().numpy() for name, tensor in second.state_dict().items()}
    rnn_options = Options(**{name: getattr(of_second, name) for name in Options.__annotations__})

    def next_log_probs(src: Sequence[int], prefix: Sequence[int]) -> list[float]:
        tgt = [BOS, *prefix]
        of_transformer = transformer(np.array(src), np.array(tgt), weights, options_of(of_first))[-1]
        hidden, _ = hidden_states(rnn, rnn_options, src, tgt)
        of_rnn = hidden[-1] @ rnn["output_embedding.weight"].T + rnn.get("output_bias", 0.0)
        both = [np.exp(log_softmax(logits)) for logits in (of_transformer, of_rnn)]
        return [float(value) for value in np.log(sum(both) / 2)]

    return Ensemble([first, second]).eval(), next_log_probs


@pytest.mark.parametrize("beam", [1, 3])
def test_the_search_agrees_with_a_search_over_the_mean_in_float64(beam: int) -> None:
    ensemble, next_log_probs = in_numpy()
    sources = [ids.tolist() for ids in cases.sentences([3, 7, 5, 1])]
    options = DecodingOptions(beam=beam, n_best=beam)
    search = partial(beam_search, src=pad_sources(sources), options=options, max_length=8)
    ours = search(ensemble)
    for model in ensemble.models:
        assert [found[0].ids for found in search(model)] != [found[0].ids for found in ours]
    for src, hypotheses in zip(sources, ours, strict=True):
        expected = oracle.beam_search(
            next_log_probs, [*src, EOS], beam=beam, n_best=beam, max_length=8, alpha=options.length_penalty
        )
        assert [(h.ids, h.finished) for h in hypotheses] == [(ids, finished) for ids, _, _, finished in expected]
        assert [h.log_prob for h in hypotheses] == pytest.approx([value for _, value, _, _ in expected], abs=1e-4)
        assert [h.score for h in hypotheses] == pytest.approx([score for _, _, score, _ in expected], abs=1e-4)


def test_scores_agree_with_the_mean_in_float64() -> None:
    ensemble, next_log_probs = in_numpy()
    src, tgt = [5, 6, 7], [8, 4, 4, 9]
    (scores,) = TorchEngine(ensemble).score([Example(src, tgt)])
    expected = [next_log_probs([*src, EOS], tgt[:n])[token] for n, token in enumerate([*tgt, EOS])]
    assert scores == pytest.approx(expected, abs=1e-4)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("beam", [1, 4])
def test_neighbours_order_and_padding_change_nothing(beam: int) -> None:
    models: list[nn.Module] = []
    for seed, options in enumerate(MEMBERS):
        models.append(untrained(Settings.from_mapping({"model": options}), n_src=N_TOKENS, n_tgt=N_TOKENS, seed=seed))
    ensemble = Ensemble(models).eval()
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randint(4, N_TOKENS, (n,), generator=generator).tolist() for n in (1, 2, 16, 17, 31, 8, 33, 5, 24)]
    search = partial(beam_search, ensemble, options=DecodingOptions(beam=beam, n_best=beam), max_length=12)
    alone = [search(pad_sources([src]))[0] for src in sources]
    assert len({hypotheses[0].ids for hypotheses in alone}) > 3
    assert search(pad_sources(sources)) == alone
    assert search(pad_sources(sources[::-2])) == alone[::-2]


@pytest.mark.parametrize("n_models", [2, 6])
def test_the_mean_has_the_same_bits_at_any_position_of_a_batch(n_models: int) -> None:
    logits = torch.randn(n_models, 64, 37, generator=torch.Generator().manual_seed(0)) * 4
    log_probs = logits.log_softmax(-1)
    whole = mean_log_probs([*log_probs])
    expected = log_probs.double().exp().mean(0).log()
    torch.testing.assert_close(whole.double(), expected, rtol=1e-6, atol=1e-6)
    for n in (1, 2, 3, 5, 17):
        assert torch.equal(torch.cat([mean_log_probs([*rows]) for rows in log_probs.split(n, 1)]), whole)


def test_an_ensemble_of_a_model_with_itself_is_the_model(runs: list[Path]) -> None:
    run = runs[1]
    one, ensemble = Translator.load(run, device="cpu"), Translator.load([run, run, run], device="cpu")
    for options in (DecodingOptions(beam=3, n_best=3), DecodingOptions(sample=True, n_best=2, top_k=5)):
        for alone, together in zip(*(t.translate(LINES, options) for t in (one, ensemble)), strict=True):
            assert [c.text for c in together.candidates] == [c.text for c in alone.candidates]
            scores = [c.score for c in alone.candidates]
            assert [c.score for c in together.candidates] == pytest.approx(scores, abs=1e-4)
    targets = [translation.text for translation in one.translate(LINES)]
    for alone_scores, scores_together in zip(one.score(LINES, targets), ensemble.score(LINES, targets), strict=True):
        assert scores_together.token_log_probs == pytest.approx(alone_scores.token_log_probs, abs=1e-4)
    assert one.align(LINES, targets) == ensemble.align(LINES, targets)


def test_search_sampling_scoring_and_prefixes_agree(runs: list[Path]) -> None:
    translator = Translator.load(runs, device="cpu")
    assert "does not support ensembles" in translator.choice.slow_because
    alone = [Translator.load(run, device="cpu") for run in runs]
    for options in (DecodingOptions(beam=4, n_best=2), DecodingOptions(sample=True, n_best=2)):
        translations = translator.translate(LINES, options)
        outputs = [(line, c) for line, found in zip(LINES, translations, strict=True) for c in found.candidates]
        lines, targets = [line for line, _ in outputs], [candidate.ids for _, candidate in outputs]
        of_members = [[score.token_log_probs for score in member.score(lines, targets)] for member in alone]
        for score, (_, candidate), *each in zip(translator.score(lines, targets), outputs, *of_members, strict=True):
            mean = np.log(np.mean(np.exp(np.array(each, dtype=np.float64)), axis=0))
            assert score.token_log_probs == pytest.approx(mean, abs=1e-4)
            n = len(candidate.ids) + candidate.finished
            assert candidate.log_prob == pytest.approx(mean[:n].sum(), abs=1e-3)
    prefix = translator.translate(LINES[3]).text[:6]
    assert translator.translate(LINES[0], prefixes=[prefix]).text.startswith(prefix)


def test_the_attention_of_a_trained_head_is_the_first_models(runs: list[Path]) -> None:
    pairs, heads = [Example([5, 6, 7], [8, 9]), Example([4], [4, 5])], [(0, 1), (0, 2)]
    alone, ensemble = (Translator.load(run, device="cpu").engine for run in (runs[0], runs))
    for first, mean in zip(alone.attention(pairs, heads), ensemble.attention(pairs, heads), strict=True):
        np.testing.assert_allclose(mean, first, atol=1e-5)


def test_the_shortest_range_of_positions_is_the_ensembles(tmp_path: Path, runs: list[Path]) -> None:
    short = marians.make_run(tmp_path / "short", positions="learned", max_positions=20)
    translator = Translator.load([runs[0], short], device="cpu")
    assert translator.longest == 19
    assert "takes at most 19" in translator.translate("a man " * 20, split=False).note


def with_languages(path: Path, copy_of: Path, tgt_lang: str) -> Path:
    shutil.copytree(copy_of, path)
    with RunFolder.open_locked(path) as folder:
        folder.write_settings(folder.settings.with_values("data", src_lang="en", tgt_lang=tgt_lang))
    return path


def test_runs_that_do_not_fit_are_named(tmp_path: Path, runs: list[Path]) -> None:
    separate = marians.make_run(tmp_path / "separate", joint=False, tie="two_way")
    larger = text_runs.make_run(tmp_path / "larger", kind="transformer")
    english, french = (with_languages(tmp_path / code, runs[0], code) for code in ("de", "fr"))
    for first, second, parts in (
        (runs[0], separate, ("target vocabulary", "token 7 is", "tokenizer.start")),
        (runs[0], larger, ("source vocabulary", "not Tokenizer of ")),
        (english, french, ("is a model for 'fr'", "for 'de'")),
    ):
        with pytest.raises(SettingsError) as error:
            Translator.load([first, second])
        assert all(part in str(error.value) for part in (str(first), str(second), *parts)), error.value
