"""M2M-100, NLLB, mBART-50, mBART-25 and BART of transformers, compared with ours: random small models.

Logits are compared by the export, which every test goes through. TRANSDUCE_MODELS=N: that many models of each kind.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hard_strings import HARD
from marians import LINES, state_of
from oracle.quiet_transformers import transformers
from seq2seqs import MORE, write_model, write_tokenizer
from system.commands import assert_same_weights
from transduce.config.decoding import DecodingOptions
from transduce.convert.exporting import export_run
from transduce.convert.importing import import_run
from transduce.data.batch import pad_sources
from transduce.data.store import Example
from transduce.decoding.constraints import Beginning
from transduce.decoding.native_engine import NativeEngine
from transduce.decoding.search import beam_search
from transduce.decoding.torch_engine import TorchEngine
from transduce.decoding.translator import Translator
from transduce.errors import UserError
from transduce.text.special import BOS, EOS, PAD

pytestmark = pytest.mark.usefixtures("few_pieces")
KINDS = ("m2m", "nllb", "mbart", "bart", "nllb legacy", "mbart25")
LANGUAGE_LAST = ("mbart25", "nllb legacy")
N_MODELS = int(os.environ.get("TRANSDUCE_MODELS", "1"))
TEXTS = [*LINES[::12], MORE[0], MORE[2]]
LONGEST = 11


def load(path: Path, kind: str) -> Translator:
    translator = Translator.load(path)
    return translator if kind == "bart" else translator.between("en", "deu")


def rows_of(model: Any) -> dict[int, int]:
    """Their id of each of ours that is not special. The token that starts the decoder is."""
    special = (1, 2, 3, model.config.decoder_start_token_id)
    return dict(enumerate((i for i in range(model.config.vocab_size) if i not in special), 4))


@pytest.mark.parametrize("seed", range(N_MODELS))
@pytest.mark.parametrize("kind", KINDS)
def test_both_engines_find_what_generate_finds(tmp_path: Path, kind: str, seed: int) -> None:
    likely_end = 3.0 if seed == 0 and kind not in LANGUAGE_LAST else 6.0
    model = write_model(
        tmp_path / "theirs", kind, 10 * seed + KINDS.index(kind), eos=likely_end, max_position_embeddings=64
    )
    list(import_run(tmp_path / "theirs", tmp_path / "run"))
    lines = list(export_run(tmp_path / "run", "huggingface", tmp_path / "out"))
    assert "checked: outputs of transformers" in lines[1]
    ours = load(tmp_path / "run", kind)
    assert isinstance(ours.engine, NativeEngine), ours.choice.slow_because
    languages = {"m2m": ("en", "de"), "nllb": ("eng_Latn", "deu_Latn"), "mbart": ("en_XX", "de_DE")}
    names = languages.get(kind.split()[0].removesuffix("25"))
    src_lang = {"src_lang": names[0]} if names else {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", **src_lang)
    first = {"m2m": "__de__"}.get(kind, names[1] if names else "<s>")
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    rows = rows_of(model)
    for text, row, mask in zip(TEXTS, inputs["input_ids"].tolist(), inputs["attention_mask"].tolist(), strict=True):
        expected = [i for i, real in zip(row, mask, strict=True) if real]
        expected = [expected[-1], *expected[:-2]] if kind in LANGUAGE_LAST else expected[:-1]
        assert [rows.get(i, 3) for i in ours.tokenizers.src.encode(text)] == expected
    never = [[1], [3]] + ([[model.config.decoder_start_token_id]] if kind == "mbart25" else [])
    options = {
        "forced_bos_token_id": None if kind == "mbart25" else tokenizer.convert_tokens_to_ids(first),
        "forced_eos_token_id": None,
        "bad_words_ids": never,
        "max_length": LONGEST + 1,
    }
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    greedy = theirs.generate(**inputs, **options, num_beams=1).tolist()
    for translation, row in zip(ours.translate(TEXTS, beam=1, max_length=LONGEST), greedy, strict=True):
        assert [rows[i] for i in translation.ids] == row[1 : row.index(2, 1) if 2 in row[1:] else None]
    src = pad_sources(ours.tokenizers.src.encode_batch(TEXTS))
    frame = ours.tokenizers.tgt.frame or ()
    beginnings = [Beginning(frame, n_unscored=len(frame))] * len(TEXTS)
    found = beam_search(
        ours.model, src, DecodingOptions(beam=5), max_length=LONGEST, patience=float("inf"), beginnings=beginnings
    )
    beams = theirs.generate(**inputs, **options, num_beams=5, early_stopping="never").tolist()
    ended = [(h[0].ids, row) for h, row in zip(found, beams, strict=True) if 2 in row[1:] and h[0].finished]
    assert ended or seed, "the searches of each kind's first model end"
    for ids, row in ended:
        assert [rows[i] for i in ids] == row[1 : row.index(2, 1)]
    native = ours.translate(TEXTS, beam=5, max_length=LONGEST)
    torch_found = beam_search(ours.model, src, DecodingOptions(beam=5), max_length=LONGEST, beginnings=beginnings)
    assert [one.ids for one in native] == [h[0].ids for h in torch_found]


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_trip_keeps_the_bits(tmp_path: Path, kind: str) -> None:
    write_model(tmp_path / "theirs", kind, 3)
    list(import_run(tmp_path / "theirs", tmp_path / "run"))
    list(export_run(tmp_path / "run", "huggingface", tmp_path / "out"))
    list(import_run(tmp_path / "out", tmp_path / "again"))
    assert_same_weights(tmp_path / "run", tmp_path / "again")
    ours, again = load(tmp_path / "run", kind), load(tmp_path / "again", kind)
    assert ours.translate(TEXTS, beam=2, max_length=9) == again.translate(TEXTS, beam=2, max_length=9)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_in_many_scripts_are_split_alike(tmp_path: Path, kind: str) -> None:
    """The tokenizers library keeps spaces at the ends, and what becomes one: it gets texts that have none."""
    model = write_model(tmp_path / "theirs", kind, 5)
    list(import_run(tmp_path / "theirs", tmp_path / "run"))
    theirs, translator = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs"), load(tmp_path / "run", kind)
    ours, rows = translator.tokenizers.src.with_frame(()), rows_of(model)
    for text in [*LINES, *MORE, *(text for text in HARD if "<" not in text)]:
        if kind == "mbart25" and text == "\x85":
            continue  # a space there, an unknown character in SentencePiece
        if kind not in ("m2m", "bart"):
            text = ours.normalized(text)
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert [rows.get(i, 3) for i in ours.encode(text)] == expected, text


@pytest.mark.parametrize("written", ["float16", "bfloat16", "sharded", "without lm_head", "only pickled"])
def test_weights_in_other_forms_are_read(tmp_path: Path, written: str) -> None:
    model = write_model(tmp_path / "theirs", "m2m", 6, tie_word_embeddings=True)
    path = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(path)
    if written in ("float16", "bfloat16"):
        save_file({name: tensor.to(getattr(torch, written)) for name, tensor in tensors.items()}, path)
    elif written == "sharded":
        path.unlink()
        model.save_pretrained(tmp_path / "theirs", max_shard_size="4KB")
        assert not path.exists()
    elif written == "without lm_head":
        save_file({name: tensor for name, tensor in tensors.items() if "lm_head" not in name}, path)
    else:
        path.unlink()
        torch.save({**tensors, "lm_head.weight": tensors["model.shared.weight"]}, path.with_name("pytorch_model.bin"))
    list(import_run(tmp_path / "theirs", tmp_path / "run"))
    table = state_of(tmp_path / "run")["tgt_embedding.table.weight"]
    expected = model.model.shared.weight
    if "float16" in written:
        expected = expected.to(getattr(torch, written)).float()
    assert torch.equal(table[[PAD, BOS, EOS]], expected[[1, 2, 2]])


def test_a_user_s_mistakes_are_one_line(tmp_path: Path) -> None:
    write_model(tmp_path / "theirs", "nllb", 7)
    list(import_run(tmp_path / "theirs", tmp_path / "run"))
    translator = Translator.load(tmp_path / "run")
    for call, said in (
        (lambda: translator.translate("a man ."), "5 languages: give src_lang and tgt_lang"),
        (lambda: translator.between("en", "fr"), "tgt_lang = 'fr'.*it has ace_Arab"),
        (lambda: translator.between("en", "zh_Hanz"), "did you mean 'zho_Hans'"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            call()
        assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    for name in ("sentencepiece.bpe.model", "tokenizer.json"):
        (tmp_path / "theirs" / name).unlink()
    with pytest.raises(UserError, match=r"has no vocabulary: neither sentencepiece\.bpe\.model, nor tokenizer\.json"):
        list(import_run(tmp_path / "theirs", tmp_path / "x"))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("kind", LANGUAGE_LAST)
def test_attention_to_a_language_behind_the_source_has_the_order_of_the_source(tmp_path: Path, kind: str) -> None:
    write_model(tmp_path / "theirs", kind, 9)
    list(import_run(tmp_path / "theirs", tmp_path / "run"))
    ours = load(tmp_path / "run", kind)
    pairs = [Example(ours.tokenizers.src.encode(text), ours.tokenizers.tgt.encode(text)) for text in TEXTS[:4]]
    heads = [(0, 0)]
    native, exact = ours.engine, TorchEngine(ours.model)
    assert isinstance(native, NativeEngine)
    for found, expected in zip(native.attention(pairs, heads), exact.attention(pairs, heads), strict=True):
        assert np.allclose(found, expected, atol=1e-5)
    for found, expected in zip(native.score(pairs), exact.score(pairs), strict=True):
        assert np.allclose(found, expected, atol=1e-4)


def test_mbart_25_translates_into_the_language_that_starts_its_decoder(tmp_path: Path) -> None:
    write_model(tmp_path / "theirs", "mbart25", 9)
    list(import_run(tmp_path / "theirs", tmp_path / "run"))
    with pytest.raises(UserError, match=r"tgt_lang = 'fr'.*it has de_DE"):
        Translator.load(tmp_path / "run").between("en", "fr")
    path = tmp_path / "theirs" / "config.json"
    config = json.loads(path.read_text())
    starts_with = "mBART-25 starts with the token of its target language"
    for start in (None, 2, 10_000):
        path.write_text(json.dumps(config | {"decoder_start_token_id": start}))
        with pytest.raises(UserError, match=f"decoder_start_token_id = {start}.*{starts_with}"):
            list(import_run(tmp_path / "theirs", tmp_path / "other"))
    path.write_text(json.dumps(config | {"decoder_start_token_id": None}))
    named = tmp_path / "theirs" / "tokenizer_config.json"
    named.write_text(json.dumps(json.loads(named.read_text()) | {"tgt_lang": "ro_RO"}))
    list(import_run(tmp_path / "theirs", tmp_path / "other"))
    assert Translator.load(tmp_path / "other").between("en", "ro").translate("a man .", max_length=4).text is not None


def test_mbart_50_that_starts_with_a_language_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "theirs", "mbart", 9)
    path = tmp_path / "theirs" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"decoder_start_token_id": config["vocab_size"] - 2}))
    with pytest.raises(UserError, match=r"decoder_start_token_id = .*must start with pad or the end"):
        list(import_run(tmp_path / "theirs", tmp_path / "run"))


def test_language_codes_in_a_text_are_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "theirs", "nllb")
    write_model(tmp_path / "model", "nllb", 8)
    list(import_run(tmp_path / "model", tmp_path / "run"))
    ours = load(tmp_path / "run", "nllb").tokenizers
    assert ours.src.framing.languages["deu_Latn"] not in ours.src.encode("a deu_Latn man")
    assert ours.src.encode("") == [] and ours.tgt.decode(ours.tgt.encode("a man")) == "a man"
