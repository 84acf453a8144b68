"""T5, mT5 and MADLAD-400 of transformers, compared with ours: random small models.

Logits and tokenizers are compared by the import. TRANSDUCE_MODELS=N: that many models of each kind.
"""

import io
import json
import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch

from hard_strings import HARD
from marians import LINES, state_of
from oracle.quiet_transformers import transformers
from seq2seqs import MORE
from transduce.config.decoding import DecodingOptions
from transduce.config.settings import Settings
from transduce.convert.exporting import export_run
from transduce.convert.importing import import_run
from transduce.data.batch import pad_sources
from transduce.data.store import Example
from transduce.decoding.engine import DecodingInput
from transduce.decoding.native_engine import NativeEngine
from transduce.decoding.search import beam_search
from transduce.decoding.torch_engine import TorchEngine
from transduce.decoding.translator import Translator
from transduce.errors import SettingsError, UserError
from transduce.logging import Log
from transduce.metrics_log import MetricsFile
from transduce.pipeline import train

pytestmark = pytest.mark.usefixtures("few_pieces")
KINDS = ("t5", "t5 1.1", "mt5", "madlad")
N_MODELS = int(os.environ.get("TRANSDUCE_MODELS", "1"))
TEXTS = [*LINES[::16], MORE[0]]
LONGEST = 9


@cache
def pieces(*languages: str) -> bytes:
    """A SentencePiece model with T5's special ids, and tokens for languages."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*LINES, *MORE * 4]),
        model_writer=model,
        vocab_size=160,
        character_coverage=1.0,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
        user_defined_symbols=list(languages),
    )
    return model.getvalue()


def write_model(path: Path, kind: str, seed: int, **options: Any) -> Any:
    """Write a random model and its vocabulary; return the model. Heads are often wider than d_model / n_heads."""
    draw = random.Random(seed)
    path.mkdir()
    model = pieces("<2de>", "<2fr>") if kind == "madlad" else pieces()
    (path / "spiece.model").write_bytes(model)
    n_extra = 0 if kind == "madlad" else 100
    tokenizer = {"tokenizer_class": "T5Tokenizer", "extra_ids": n_extra}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    n_pieces = sentencepiece.SentencePieceProcessor(model_proto=model).vocab_size() + n_extra
    config: dict[str, Any] = {
        "vocab_size": n_pieces + draw.choice([0, -n_pieces % 64]),
        "d_model": draw.choice([12, 20]),
        "d_kv": draw.choice([4, 5, 6]),
        "num_heads": draw.choice([2, 3, 4]),
        "d_ff": draw.choice([16, 24]),
        "num_layers": draw.randint(1, 3),
        "num_decoder_layers": draw.randint(1, 2),
        "feed_forward_proj": "relu" if kind == "t5" else "gated-gelu",
        "decoder_start_token_id": 0,
        "dtype": "float32",
        **options,
    }
    if kind in ("t5 1.1", "madlad"):
        config["tie_word_embeddings"] = False
    family = "MT5" if kind == "mt5" else "T5"
    transformers.set_seed(seed)
    theirs = getattr(transformers, f"{family}ForConditionalGeneration")(
        getattr(transformers, f"{family}Config")(**config)
    ).eval()
    with torch.no_grad():
        if kind in ("t5 1.1", "madlad"):
            theirs.lm_head.weight = torch.nn.Parameter(torch.randn_like(theirs.lm_head.weight))
        for name, weight in theirs.named_parameters():
            weight += (1 if "relative_attention_bias" in name else 0.1) * torch.randn_like(weight)
        theirs.decoder.final_layer_norm.weight *= 0.15  # similar logits, and a likely end, so that searches end
        ids = torch.tensor([[5, 6, 7, 1]])
        hidden = theirs(input_ids=ids, decoder_input_ids=ids - 1, output_hidden_states=True).decoder_hidden_states[-1]
        mean, scale = hidden[0].mean(0), config["d_model"] ** 0.5 if kind == "t5" else 1.0
        theirs.lm_head.weight[1] = 4 * scale * mean / mean.square().sum()
    theirs.save_pretrained(path)
    return theirs


def rows_of(n: int) -> dict[int, int]:
    """Their id of each of ours, of n."""
    return {**{1: 2, 2: 0, 3: 1}, **{i + 1: i for i in range(3, n)}}


def load(run: Path, kind: str) -> Translator:
    translator = Translator.load(run)
    return translator.between(None, "de") if kind == "madlad" else translator


def generated(folder: Path, kind: str) -> dict[int, list[list[int]]]:
    """The outputs of transformers' `generate` for TEXTS by the number of beams."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    inputs = transformers.AutoTokenizer.from_pretrained(folder)(
        [("<2de> " if kind == "madlad" else "") + text for text in TEXTS], return_tensors="pt", padding=True
    )
    # The cache of transformers has as many layers as the encoder, also if the decoder has more.
    options: dict[str, Any] = {"bad_words_ids": [[0], [2]], "max_length": LONGEST + 1, "use_cache": False}
    options |= {"forced_eos_token_id": None, "length_penalty": 1.0, "no_repeat_ngram_size": 0}
    early = {1: {}, 5: {"early_stopping": "never"}}
    return {n: model.generate(**inputs, **options, num_beams=n, **early[n]).tolist() for n in early}


def assert_found(ours: Translator, folder: Path, kind: str, *, must_end: bool) -> None:
    """Check that our searches find what transformers' find with the model in a folder."""
    theirs, rows = generated(folder, kind), rows_of(transformers.AutoConfig.from_pretrained(folder).vocab_size)
    for translation, row in zip(ours.translate(TEXTS, beam=1, max_length=LONGEST), theirs[1], strict=True):
        assert [rows[i] for i in translation.ids] == row[1 : row.index(1, 1) if 1 in row[1:] else None]
    src = pad_sources(ours.tokenizers.src.encode_batch(TEXTS))
    results = beam_search(ours.model, src, DecodingOptions(beam=5), max_length=LONGEST, patience=float("inf"))
    ended = [(h[0].ids, row) for h, row in zip(results, theirs[5], strict=True) if 1 in row[1:] and h[0].finished]
    assert ended or not must_end
    for ids, row in ended:
        assert [rows[i] for i in ids] == row[1 : row.index(1, 1)]


def logits_of(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    ids = torch.randint(3, model.config.vocab_size, (4, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids[:2], decoder_input_ids=ids[2:]).logits


@pytest.mark.parametrize("seed", range(N_MODELS))
@pytest.mark.parametrize("kind", KINDS)
def test_an_imported_model_translates_as_in_transformers_and_returns_to_it(
    tmp_path: Path, kind: str, seed: int
) -> None:
    model = write_model(tmp_path / "theirs", kind, 10 * seed + KINDS.index(kind))
    lines = list(import_run(tmp_path / "theirs", tmp_path / "run"))
    assert any(line.startswith("checked: outputs of transformers") for line in lines), lines
    if kind == "madlad":
        with pytest.raises(SettingsError, match="2 languages: give tgt_lang"):
            Translator.load(tmp_path / "run").translate("a dog")
    ours = load(tmp_path / "run", kind)
    assert not ours.choice.notes(), "the native library decodes"
    rows, prefix = rows_of(model.config.vocab_size), "<2de> " if kind == "madlad" else ""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    sources = ours.tokenizers.src.encode_batch(TEXTS)
    for text, ids in zip(TEXTS, sources, strict=True):
        assert [rows[i] for i in ids] == tokenizer(prefix + text)["input_ids"][:-1]
    assert_found(ours, tmp_path / "theirs", kind, must_end=seed == 0)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "theirs").eval()
    inputs = tokenizer([prefix + text for text in TEXTS], return_tensors="pt", padding=True)
    assert_native_is_exact(ours, theirs, inputs, sources)

    lines = list(export_run(tmp_path / "run", "huggingface", tmp_path / "out"))
    assert lines[1].startswith("checked: outputs of transformers"), lines
    torch.testing.assert_close(logits_of(tmp_path / "out"), logits_of(tmp_path / "theirs"), rtol=0, atol=1e-4)
    assert generated(tmp_path / "out", kind) == generated(tmp_path / "theirs", kind)
    list(import_run(tmp_path / "out", tmp_path / "again"))
    before, after = state_of(tmp_path / "run"), state_of(tmp_path / "again")
    assert before.keys() == after.keys()
    for name in before:  # queries are divided and multiplied by the root of their width
        torch.testing.assert_close(before[name], after[name], rtol=1e-6, atol=0)


def assert_native_is_exact(ours: Translator, theirs: Any, inputs: Any, sources: list[list[int]]) -> None:
    """The native engine has the log-probabilities of transformers, and the hypotheses of our engine in PyTorch."""
    native, pytorch, rows = ours.engine, TorchEngine(ours.model), rows_of(theirs.config.vocab_size)
    assert isinstance(native, NativeEngine)
    asked = [DecodingInput((i,), ids, LONGEST) for i, ids in enumerate(sources)]
    for beam in (1, 5):
        options = DecodingOptions(beam=beam, n_best=beam)
        for one, other in zip(*(engine.translate(asked, options) for engine in (native, pytorch)), strict=True):
            assert [h.ids for h in one] == [h.ids for h in other]
            assert [h.score for h in one] == pytest.approx([h.score for h in other], abs=1e-4)
    tokens = [5 + i % 40 for i in range(200)]  # beyond the distances that have buckets of their own
    labels = torch.tensor([[rows[i] for i in tokens] + [1]]).expand(len(sources), -1)
    starts = torch.zeros_like(labels[:, :1])
    logits = theirs(**inputs, decoder_input_ids=torch.cat([starts, labels[:, :-1]], 1)).logits
    expected = logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    found = torch.tensor(native.score([Example(ids, tokens) for ids in sources]))
    torch.testing.assert_close(found, expected.detach(), atol=1e-4, rtol=1e-5)


def test_texts_in_many_scripts_are_split_alike(tmp_path: Path) -> None:
    model = write_model(tmp_path / "theirs", "mt5", 5)
    list(import_run(tmp_path / "theirs", tmp_path / "run"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    ours = Translator.load(tmp_path / "run").tokenizers.src
    rows = rows_of(model.config.vocab_size)
    for text in [*LINES, *MORE, *(text for text in HARD if "<" not in text)]:
        text = " ".join(ours.normalized(text).split())  # the tokenizers library normalizes some sequences differently
        assert [rows[i] for i in ours.encode(text)] == theirs(text, add_special_tokens=False)["input_ids"], text


@pytest.mark.parametrize("kind", KINDS)
def test_a_fine_tuned_model_returns_to_transformers(tmp_path: Path, kind: str) -> None:
    write_model(tmp_path / "theirs", kind, 3)
    list(import_run(tmp_path / "theirs", tmp_path / "start"))
    for side in ("en", "de"):
        (tmp_path / f"train.{side}").write_text("".join(f"{line}\n" for line in LINES * 2))
    corpus = {"src": str(tmp_path / "train.en"), "tgt": str(tmp_path / "train.de")}
    limits = {"max_updates": 20, "valid_updates": 20, "batch_tokens": 200, "lr": 0.01, "warmup_updates": 1}
    values = {
        "data": {"train": [corpus], "src_lang": "en", "tgt_lang": "de"},
        "training": {"start": str(tmp_path / "start"), **limits},
    }
    train(Settings.from_mapping(values), tmp_path / "run", log=Log(quiet=True))
    events = MetricsFile(tmp_path / "run" / "metrics.jsonl").read()
    losses = [event["loss"] for event in events if event["event"] == "validation"]
    assert losses[-1] < losses[0]
    lines = list(export_run(tmp_path / "run", "huggingface", tmp_path / "out"))
    assert lines[1].startswith("checked: outputs of transformers"), lines
    assert_found(load(tmp_path / "run", kind), tmp_path / "out", kind, must_end=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"relative_attention_num_buckets": 16}, "relative_attention_num_buckets = 16; supported: 32"),
        ({"feed_forward_proj": "gated-swish"}, None),
        ({"decoder_start_token_id": 1}, "the decoder must start with pad"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, options: dict[str, Any], message: str | None) -> None:
    write_model(tmp_path / "theirs", "t5", 3, **options)
    if message is None:
        assert any("checked" in line for line in import_run(tmp_path / "theirs", tmp_path / "run"))
        assert "checked" in list(export_run(tmp_path / "run", "huggingface", tmp_path / "out"))[1]
        return
    with pytest.raises(UserError, match=message):
        list(import_run(tmp_path / "theirs", tmp_path / "run"))
    assert not (tmp_path / "run").exists()
