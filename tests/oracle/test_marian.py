"""Transformers' MarianMTModel and MarianTokenizer, and CTranslate2, compared with ours: random small models.

Needs transformers and ctranslate2 (`pip install -e .[interchange]`). A real model: TRANSDUCE_MARIAN=FOLDER. Logits and
gradients are compared in test_random_models.py. TRANSDUCE_MODELS=N: the searches of that many models.
"""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hard_strings import HARD
from marians import LINES, make_run
from oracle.quiet_transformers import transformers
from oracle.twins import marian_folder, marian_rows, moved
from system.commands import assert_same_weights
from transduce.config.decoding import DecodingOptions
from transduce.convert import seq2seq
from transduce.convert.exporting import export_run
from transduce.convert.importing import import_run
from transduce.convert.parity import examples
from transduce.data.batch import pad_sources
from transduce.decoding.search import beam_search
from transduce.decoding.translator import Translator
from transduce.errors import TransduceError
from transduce.text.special import BOS, EOS, PAD, UNK

pytestmark = pytest.mark.filterwarnings("ignore:.*sacremoses")

REAL = os.environ.get("TRANSDUCE_MARIAN")
N_MODELS = int(os.environ.get("TRANSDUCE_MODELS", "4"))


@pytest.mark.usefixtures("few_pieces")
@pytest.mark.parametrize("seed", range(1, N_MODELS + 1))
def test_search_equals_generate(tmp_path: Path, seed: int) -> None:
    """Patience inf equals early_stopping "never".

    At the length limit they differ: theirs compares truncated with finished hypotheses, ours ranks finished ones first.
    """
    other = marian_folder(tmp_path / "theirs", random.Random(seed), eos=4.0, max_position_embeddings=32)
    lines = list(import_run(tmp_path / "theirs", tmp_path / "run"))
    assert any(line.startswith("checked: outputs of transformers") for line in lines), lines
    ours, c = Translator.load(tmp_path / "run").model, other.config
    src, tgt = marian_rows(c)
    batch = examples(c.vocab_size + 1, c.decoder_vocab_size + 1, seed=seed).src
    for penalty in (0.6, 1.0):
        found = beam_search(
            ours, batch, DecodingOptions(beam=4, length_penalty=penalty), max_length=11, patience=float("inf")
        )
        expected = other.generate(
            input_ids=moved(batch, src, c.pad_token_id),
            attention_mask=(batch != PAD).long(),
            num_beams=4,
            max_length=12,
            length_penalty=penalty,
            early_stopping="never",
            bad_words_ids=[[c.pad_token_id], [1]],
            forced_eos_token_id=None,
        )
        ended = [(h[0], row) for h, row in zip(found, expected.tolist(), strict=True) if 0 in row]
        assert len(ended) >= 4 or seed > 4, "the searches of the first models end"
        assert all(hypothesis.finished for hypothesis, _ in ended)
        for hypothesis, row in ended:
            assert tgt.index[list(hypothesis.ids)].tolist() == row[1 : row.index(0)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """A tokenizer of transformers, ours of the same files, and the ids of ours."""
    path = tmp_path_factory.mktemp("pair")
    list(export_run(make_run(path / "run"), "huggingface", path / "theirs"))
    ids = json.loads((path / "theirs" / "vocab.json").read_text())
    longest = sorted((piece for piece in ids if piece[0] != "<"), key=len)[-2:]
    renamed = dict(zip(longest, (">>deu<<", "猫猫猫"), strict=True))  # only vocab.json is changed
    ids = {renamed.get(piece, piece): i for piece, i in ids.items()}
    (path / "theirs" / "vocab.json").write_text(json.dumps(ids))
    list(import_run(path / "theirs", path / "again"))
    ours = Translator.load(path / "again").tokenizers
    return transformers.MarianTokenizer.from_pretrained(path / "theirs"), ours, ids


def compare(pair: tuple[Any, Any, Any], text: str) -> None:
    other, ours, ids = pair
    for side, argument in ((ours.src, {"text": text}), (ours.tgt, {"text_target": text})):
        expected = other(**argument, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        own = {ids["<unk>"]: UNK, ids["<pad>"]: BOS, ids["</s>"]: EOS}
        names = {i: piece for piece, i in ids.items()}
        pieces = side.pieces(range(side.vocab_size))
        assert side.encode(text) == [own[i] if i in own else pieces.index(names[i]) for i in expected], text


def test_encoding_equals_theirs(pair: tuple[Any, Any, Any]) -> None:
    for text in HARD:
        compare(pair, text)


@hypothesis_settings(max_examples=150, deadline=None)
@given(text=st.text(st.one_of(st.sampled_from(sorted(set("".join(LINES)))), st.characters(exclude_categories=["Cs"]))))
def test_encoding_of_any_text_equals_theirs(pair: tuple[Any, Any, Any], text: str) -> None:
    compare(pair, text)


def test_special_pieces_in_text_are_text_here_and_ids_there(pair: tuple[Any, Any, Any]) -> None:
    """The one intended difference: `</s>` in a text does not end the sentence."""
    other, ours, ids = pair
    assert ids["</s>"] in other("a </s> man", add_special_tokens=False)["input_ids"]
    assert EOS not in ours.src.encode("a </s> man")


@pytest.mark.parametrize("text", [*LINES[::5], "die Kinder  spielen"])
def test_decoding_equals_theirs(pair: tuple[Any, Any, Any], text: str) -> None:
    other, ours, _ = pair
    expected = other.decode(other(text, split_special_tokens=True)["input_ids"], skip_special_tokens=True)
    assert ours.tgt.decode([i for i in ours.tgt.encode(text) if i != UNK]) == expected


@pytest.mark.parametrize(
    ("joint", "options"),
    [
        (True, {}),
        (True, {"positions": "sinusoidal_halves", "output_bias": True, "activation": "gelu_tanh"}),
        (False, {"tie": "two_way", "scale_embeddings": False, "activation": "silu"}),
        (False, {"tie": "none", "activation": "gelu"}),
    ],
)
def test_export_is_checked_and_translates_alike(tmp_path: Path, joint: bool, options: dict[str, Any]) -> None:
    """Our models in transformers: the export compares logits, the test the outputs of generate."""
    run = make_run(tmp_path / "run", joint=joint, **options)
    lines = list(export_run(run, "huggingface", tmp_path / "theirs"))
    assert "checked: outputs of transformers" in lines[1]
    tokenizer = transformers.MarianTokenizer.from_pretrained(tmp_path / "theirs")
    other = transformers.MarianMTModel.from_pretrained(tmp_path / "theirs").eval()
    ours = Translator.load(run)
    texts = LINES[::6]
    ids = pad_sources(ours.tokenizers.src.encode_batch(texts))
    found = beam_search(ours.model, ids, DecodingOptions(beam=1), max_length=10)
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    expected = other.generate(**inputs, num_beams=1, max_length=11, forced_eos_token_id=None).tolist()
    ended = [(h[0].ids, row[1 : row.index(0) if 0 in row else None]) for h, row in zip(found, expected, strict=True)]
    names = {i: piece for piece, i in (getattr(tokenizer, "target_encoder", None) or tokenizer.encoder).items()}
    for ids, row in ended:
        assert ours.tokenizers.tgt.pieces(ids) == [names[i] for i in row]
    list(import_run(tmp_path / "theirs", tmp_path / "again"))
    assert_same_weights(run, tmp_path / "again")


def test_export_that_differs_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    monkeypatch.setattr(seq2seq, "column_order", lambda s: torch.arange(s.d_model))
    with pytest.raises(TransduceError, match="not the same"):
        list(export_run(run, "huggingface", tmp_path / "out"))
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.skipif(REAL is None, reason="TRANSDUCE_MARIAN names no folder")
def test_a_real_model(tmp_path: Path) -> None:
    list(import_run(Path(str(REAL)), tmp_path / "run"))
    ours = Translator.load(tmp_path / "run").tokenizers
    other = transformers.MarianTokenizer.from_pretrained(str(REAL))
    for text in HARD:
        compare((other, ours, other.encoder), text)
    assert "checked" in list(export_run(tmp_path / "run", "huggingface", tmp_path / "theirs"))[1]
    assert "checked" in list(export_run(tmp_path / "run", "ctranslate2", tmp_path / "ct2"))[1]
