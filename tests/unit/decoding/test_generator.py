"""Text generation: prompts of any length, text longer than the context, independence of the batch, text in parts."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import text_runs
from transduce import Generator, Translator
from transduce.config.decoding import DecodingOptions
from transduce.config.settings import Settings
from transduce.data.encoding import encode_text
from transduce.data.reading import DOCUMENTS
from transduce.decoding import torch_engine
from transduce.decoding.engine import DecodingInput
from transduce.decoding.generator import IncrementalDetokenizer
from transduce.demo.corpus import demo_pairs
from transduce.errors import DataError, SettingsError
from transduce.models.registry import build_model
from transduce.runs.folder import RunFolder
from transduce.text.tokenizer import BOS, EOS, Tokenizers
from transduce.text.training import train_tokenizer

LINES = [pair.tgt for pair in demo_pairs("train", 120, seed=3)]
GREEDY = DecodingOptions(sample=True, temperature=0)
PROMPTS = ["Der Hund", "", "Die alte Frau\nsieht", "ж😀", "Der Mann"]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def made(*, context: int = 24, documents: str = "line", kind: str = "bpe", **model: object) -> Path:
        sizes = {"kind": "gpt", "d_model": 32, "d_ff": 48, "n_heads": 4, "n_decoder_layers": 2, "residual": "pre"}
        values = {
            "task": "causal",
            "model": sizes | model,
            "data": {"context": context, "documents": documents},
            "tokenizer": {"kind": kind, "exact": True},
            "decoding": {"max_length": 40},
        }
        settings = Settings.from_mapping(values)
        tokenizer = train_tokenizer(LINES, settings.tokenizer, vocab_size=400)
        path = tmp_path_factory.mktemp("generator") / "run"
        with RunFolder.create(path, settings, "") as run:
            run.save_tokenizers(Tokenizers(tokenizer, tokenizer).save)
            run.write_settings(settings)
            torch.manual_seed(1)
            model_ = build_model(settings.model, n_src=tokenizer.vocab_size, n_tgt=tokenizer.vocab_size)
            with torch.no_grad():
                for name, parameter in model_.named_parameters():
                    parameter.mul_(3.0 if parameter.dim() > 1 and "embedding" not in name else 1.0)
                model_.output_weight.mul_(3.0)  # type: ignore[operator]
            run.save_model(dict(model_.state_dict()))
        return path

    return made


@pytest.fixture(scope="module")
def generator(make: Callable[..., Path]) -> Generator:
    return Generator.load(make(), device="cpu")


def ids_of(generator: Generator, prompt: str) -> list[int]:
    return [BOS, *generator.tokenizer.encode(prompt)]


def test_greedy_equals_full_forwards_and_the_window_moves_by_half_a_context(generator: Generator) -> None:
    """Compared with generation without a cache. Past the context, the model sees its last half and fills it again."""
    for prompt, found in zip(
        PROMPTS,
        generator.generate(PROMPTS, GREEDY.model_copy(update={"max_length": 60})),
        strict=True,
    ):
        everything, start, new = ids_of(generator, prompt), 0, list[int]()
        total = 0.0
        while len(new) < 60:
            if len(everything) - start > generator.context:
                start = len(everything) - generator.context // 2
            with torch.no_grad():
                logits = generator.model.logits(generator.model(torch.tensor([everything[start:]])))[0, -1]
            known = logits.double().log_softmax(-1)
            logits[[0, BOS]] = -math.inf
            token = int(logits.argmax())
            total += known[token].item()
            if token == EOS:
                break
            new.append(token)
            everything.append(token)
        assert list(found.ids) == new
        assert found.finished == (len(new) < 60)
        assert found.log_prob == pytest.approx(total, abs=1e-3)
        assert found.text == generator.tokenizer.decode(new) and found.prompt == prompt


def test_samples_depend_on_prompt_place_and_seed_only(generator: Generator) -> None:
    options = DecodingOptions(sample=True, temperature=0.9, top_k=40, top_p=0.95, max_length=30, seed=5)
    together = generator.generate(PROMPTS, options.model_copy(update={"n_best": 3}))
    assert together == generator.generate(PROMPTS, options.model_copy(update={"n_best": 3}))
    assert [one.prompt for one in together] == [prompt for prompt in PROMPTS for _ in range(3)]
    one_each = generator.generate(PROMPTS, options)
    assert [one.ids for one in one_each] == [one.ids for one in together[::3]]
    values = options.model_dump(exclude_unset=True)
    assert generator.generate(PROMPTS, **values) == one_each
    alone = generator.generate(PROMPTS[:1], options)
    assert alone[0].ids == together[0].ids
    assert generator.generate(PROMPTS, options.model_copy(update={"seed": 6})) != one_each
    assert len({one.ids for one in together[:3]}) > 1


def test_pytorch_samples_prompts_of_any_lengths_as_alone(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "_SAMPLED_ROWS", 2)
    engine = torch_engine.TorchEngine(generator.model)
    prompts = [DecodingInput((i,), ids_of(generator, text), 3 + i) for i, text in enumerate(PROMPTS * 2)]
    options = DecodingOptions(sample=True)
    found = engine.translate(prompts, options)
    assert found == [engine.translate([prompt], options)[0] for prompt in prompts]
    assert engine.translate([], options) == []


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_prompt_longer_than_the_context_is_refused_or_cut(make: Callable[..., Path], positions: str) -> None:
    generator = Generator.load(make(positions=positions, max_positions=24, kind="char"), device="cpu")
    assert generator.generate(["x" * 23], GREEDY.model_copy(update={"max_length": 60}))[0].ids
    with pytest.raises(DataError, match=r"prompt 2 has 25 tokens; the context of this model is 24; .*cut_prompt"):
        generator.generate(["x", "x" * 24])
    cut, whole = (
        generator.generate(["y" * 30 + "x" * 24], GREEDY, cut_prompt=True),
        "x" * 24,
    )
    assert cut[0].ids == generator.generate([whole], GREEDY, cut_prompt=True)[0].ids


def test_prompts_have_no_bos_where_documents_are_files(make: Callable[..., Path]) -> None:
    """A prompt is then not the start of a document; an empty one is."""
    generator = Generator.load(make(documents="file", context=16), device="cpu")
    assert generator._prompt("Der Hund", 0, cut_prompt=False) == tuple(generator.tokenizer.encode("Der Hund"))
    assert generator._prompt("", 0, cut_prompt=False) == (BOS,)


def test_scores_equal_those_of_full_forwards(generator: Generator) -> None:
    texts = ["Der Hund.", "", "Die alte Frau sieht den alten Mann und seinen Hund, der im Garten schläft.\nж"]
    for text, score in zip(texts, generator.score(texts), strict=True):
        ids = [*ids_of(generator, text), EOS]
        expected = []
        for start in range(0, len(ids) - 1, generator.context):
            row = torch.tensor([ids[start : start + generator.context + 1]])
            with torch.no_grad():
                known = generator.model.logits(generator.model(row[:, :-1]))[0].double().log_softmax(-1)
            expected += known.gather(1, row[0, 1:, None])[:, 0].tolist()
        assert score.token_log_probs == pytest.approx(expected, abs=1e-4)
        assert score.n_tokens == len(ids) - 1


def test_evaluate_scores_every_token_once(generator: Generator) -> None:
    store = encode_text(None, DOCUMENTS["line"](iter(LINES[:9])), generator.tokenizer)
    found = generator.evaluate(store)
    assert found.n_tokens == store.n_tokens and found.n_bytes == sum(len(line.encode()) for line in LINES[:9])
    nats = 0.0
    for start in range(1, len(store), generator.context):
        row = torch.from_numpy(store.ids[start - 1 : start + generator.context].astype(np.int64))[None]
        with torch.no_grad():
            known = generator.model.logits(generator.model(row[:, :-1]))[0].double().log_softmax(-1)
        nats -= sum(known[t, i].item() for t, i in enumerate(row[0, 1:].tolist()) if i != BOS)
    assert found.nats == pytest.approx(nats, rel=1e-5)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / found.n_bytes)
    assert math.log(found.perplexity) == pytest.approx(nats / found.n_tokens)
    assert generator.evaluate(store, batch_tokens=1).nats == pytest.approx(nats, rel=1e-5)
    for stride in (1, 7, 24):
        again = generator.evaluate(store, stride=stride)
        assert (again.n_tokens, again.stride) == (found.n_tokens, stride)
    for stride in (0, 25):
        with pytest.raises(SettingsError, match="stride"):
            generator.evaluate(store, stride=stride)


def test_stride_one_predicts_every_token_from_a_full_context(generator: Generator) -> None:
    store = encode_text(None, DOCUMENTS["line"](iter(LINES[:3])), generator.tokenizer)
    nats = 0.0
    for t in range(1, len(store)):
        row = torch.from_numpy(store.ids[max(0, t - generator.context) : t + 1].astype(np.int64))[None]
        if row[0, -1] == BOS:
            continue
        with torch.no_grad():
            known = generator.model.logits(generator.model(row[:, :-1]))[0, -1].double().log_softmax(-1)
        nats -= known[row[0, -1]].item()
    assert generator.evaluate(store, stride=1).nats == pytest.approx(nats, rel=1e-5)


def test_a_single_string_is_refused(generator: Generator) -> None:
    with pytest.raises(TypeError, match="generate"):
        generator.generate("Der Hund")


def test_runs_of_another_task_are_refused(make: Callable[..., Path], make_run: Callable[..., Path]) -> None:
    with pytest.raises(SettingsError, match=r"task 'causal', not 'translation'"):
        Translator.load(make())
    with pytest.raises(SettingsError, match=r"task 'translation', not 'causal'"):
        Generator.load(make_run())


def test_empty_lists_give_empty_results(generator: Generator) -> None:
    assert generator.generate([]) == [] and generator.score([]) == []


TOKENIZER = text_runs.vocabulary(exact=True, size=400)
TEXT = "Zwei Männer 😀 lesen.\n\nEin Hund läuft: aaab, aab!\n"


def in_parts(ids: list[int], stop: list[str]) -> tuple[list[str], IncrementalDetokenizer]:
    growing = IncrementalDetokenizer(TOKENIZER, stop)
    return [*(growing.add([one]) for one in ids), growing.end()], growing


@pytest.mark.parametrize(
    "stop", [[], ["\n\n"], ["aab"], ["b!", "aab,"], ["Hund läuft"], ["😀"], ["Z"], ["xyz", "!\nx"]]
)
def test_the_text_ends_before_the_first_stop_string(stop: list[str]) -> None:
    places = [place for one in stop if (place := TEXT.find(one)) >= 0]
    expected = TEXT[: min(places)] if places else TEXT
    ids = TOKENIZER.encode(TEXT)
    parts, growing = in_parts(ids, stop)
    assert "".join(parts) == expected and growing.is_stopped == bool(places)
    assert growing.ids == ids[: len(growing.ids)] and (bool(places) or growing.ids == ids)
    whole = IncrementalDetokenizer(TOKENIZER, stop)
    assert whole.add(ids) + whole.end() == expected and whole.ids == growing.ids


def test_no_part_has_to_be_taken_back() -> None:
    drawn = random.Random(1)
    for _ in range(300):
        text = "".join(drawn.choices("aab\n", k=30))
        stop = ["".join(drawn.choices("aab\n", k=drawn.randint(2, 4)))]
        parts, growing = in_parts(TOKENIZER.encode(text), stop)
        assert "".join(parts) == text.partition(stop[0])[0]
        assert growing.is_stopped == (stop[0] in text)


def test_characters_of_several_tokens() -> None:
    ids = TOKENIZER.encode("ж😀")
    parts, _ = in_parts(ids, [])
    assert "".join(parts) == "ж😀" and all("\ufffd" not in part for part in parts) and len(ids) > 2
    assert "".join(in_parts(ids[:-1], [])[0]) == "ж\ufffd"
