"""Import of Marian's own files: compared with equations in float64, and with Marian if pymarian is installed.

TRANSDUCE_MODELS=N: that many models with random settings.
"""

import json
import os
import random
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from marian_models import (
    FLOAT32,
    INT8,
    INT8_AVX2,
    INT8_BROWSERMT,
    Weights,
    config,
    log_probs,
    make_folder,
    pieces,
    quantize,
    weights,
    write_bin,
    write_npz,
)
from marians import LINES, state_of
from system.commands import assert_same_weights
from transduce.convert.importing import import_run
from transduce.decoding.translator import Translator
from transduce.errors import UserError
from transduce.text.special import EOS, UNK
from transduce.text.tokenizer import parse_model

N_MODELS = int(os.environ.get("TRANSDUCE_MODELS", "2"))
RNN = {"transformer_decoder_autoreg": "rnn"}
PRE = {"transformer_preprocess": "n", "transformer_postprocess": "da", "transformer_postprocess_top": "n"}
OPTIONS: dict[str, dict[str, Any]] = {
    "browsermt's": {**RNN, "tied_embeddings_all": True},
    "OPUS-MT's": {"tied_embeddings_all": True, "transformer_ffn_activation": "relu"},
    "pre-norm": {**PRE, "tied_embeddings": True},
    "pre-norm, SSRU": {**RNN, **PRE, "tied_embeddings_src": True, "output_omit_bias": True},
    "untied, no projections, normed embeddings": {
        "transformer_no_projection": True,
        "transformer_postprocess_emb": "nd",
    },
}


def ids_of(translator: Translator, ids: list[int]) -> list[int]:
    """Marian's ids for ours, without the end."""
    names = {piece.piece: i for i, piece in enumerate(parse_model(pieces()).pieces)}
    return [names[piece] for piece in translator.tokenizers.tgt.pieces(i for i in ids if i != EOS)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_scores_and_greedy_translations_equal_those_of_the_equations(tmp_path: Path, options: dict[str, Any]) -> None:
    c = config(**options)
    w = weights(c)
    write_npz(tmp_path / "model.npz", c, w)
    (tmp_path / "vocab.spm").write_bytes(pieces())
    lines = list(import_run(tmp_path / "model.npz", tmp_path / "run"))
    assert "found: a translator of Marian (v1.12.42)" in lines[1] and lines[-1].startswith("translated, src to tgt")
    assert_equal_to_equations(tmp_path / "run", c, w)


def drawn(draw: random.Random) -> dict[str, Any]:
    """Random settings of a model."""
    tied = draw.choice([(), ("tied_embeddings",), ("tied_embeddings_src",), ("tied_embeddings_all",)])
    return {
        **draw.choice([{}, RNN]),
        **draw.choice([{}, PRE]),
        **dict.fromkeys(tied, True),
        "transformer_ffn_activation": draw.choice(["swish", "relu"]),
        "transformer_postprocess_emb": draw.choice(["d", "nd"]),
        "transformer_no_projection": draw.random() < 0.3,
        "output_omit_bias": draw.random() < 0.3,
    }


@pytest.mark.parametrize("seed", range(N_MODELS))
def test_models_with_random_settings_equal_the_equations(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    c, kind = config(**drawn(draw)), draw.choice([None, FLOAT32, INT8, INT8_AVX2])
    w = weights(c, seed)
    values = {name: q.astype(np.float32) / m for name, (q, m) in quantize(w).items() if not name.endswith("Wemb")}
    if kind is None:
        write_npz(tmp_path / "model.npz", c, w)
    else:
        write_bin(tmp_path / "model.bin", c, w, kind=kind)
    (tmp_path / "vocab.spm").write_bytes(pieces())
    list(import_run(tmp_path, tmp_path / "run"))
    w |= values if kind in (INT8, INT8_AVX2) else {}
    assert_equal_to_equations(tmp_path / "run", c, w)


def assert_equal_to_equations(run: Path, c: dict[str, Any], w: Weights) -> None:
    """Check both engines' scores and greedy translations."""
    for trainable in (False, True):
        translator = Translator.load(run, trainable=trainable)
        encode = translator.tokenizers.src.encode
        texts = [LINES[0], "xyz", *LINES[30::20]]
        targets = LINES[::15]
        for src, tgt, score in zip(texts, targets, translator.score(texts, targets), strict=True):
            src_ids, tgt_ids = ids_of(translator, encode(src)), ids_of(translator, encode(tgt))
            expected = log_probs(c, w, src_ids, tgt_ids)[np.arange(len(tgt_ids) + 1), [*tgt_ids, 0]]
            np.testing.assert_allclose(score.token_log_probs, expected, atol=1e-4)
        for src, found in zip(texts, translator.translate(texts, beam=1, max_length=8, split=False), strict=True):
            written = ids_of(translator, list(found.ids))
            rows = log_probs(c, w, ids_of(translator, encode(src)), written)
            rows[:, 1] = -np.inf  # Marian does not write <unk> either
            assert [*written, 0][:8] == rows.argmax(-1).tolist()[:8] and UNK not in found.ids


@pytest.mark.parametrize("kind", [FLOAT32, INT8, INT8_AVX2, INT8_BROWSERMT], ids=hex)
def test_quantized_matrices_have_their_values(tmp_path: Path, kind: int) -> None:
    """The runs of a *.bin and of a *.npz with the values that its 8-bit numbers stand for are equal."""
    folder = make_folder(tmp_path / "bin", kind=kind)
    c = config(tied_embeddings_all=True, **RNN)
    w = weights(c)
    values = {name: q.astype(np.float32) / m for name, (q, m) in (quantize(w) if kind != FLOAT32 else {}).items()}
    if kind != INT8_BROWSERMT:
        values.pop("Wemb", None)
    (tmp_path / "npz").mkdir()
    write_npz(tmp_path / "npz" / "model.npz", c, w | values)
    (tmp_path / "npz" / "vocab.spm").write_bytes(pieces())
    for source in ("bin", "npz"):
        lines = list(import_run(tmp_path / source, tmp_path / f"run {source}"))
    assert_same_weights(tmp_path / "run bin", tmp_path / "run npz")
    lines = list(import_run(folder / "model.ende.intgemm.alphas.bin", tmp_path / "again"))
    assert lines[-1].startswith("translated, en to de"), "the languages are in the names of Mozilla's files"
    assert "in the format of Marian" in (tmp_path / "again" / "README.md").read_text()


def test_vocabularies_of_opus_mt(tmp_path: Path) -> None:
    """decoder.yml names the files, with folders of another machine; a list of ids has its own order."""
    n = 72  # 8 rows of padding
    names = [piece.piece for piece in parse_model(pieces()).pieces]
    ids = {piece: i for i, piece in enumerate(["</s>", "<unk>", *reversed(names[2:])])}
    c = config(tied_embeddings_all=True, dim_vocabs=[n, n])
    write_npz(tmp_path / "opus.npz", c, weights(c))
    for name in ("source.spm", "target.spm"):
        (tmp_path / name).write_bytes(pieces())
    listed = "".join(f"{json.dumps(piece)}: {i}\n" for piece, i in ids.items())
    (tmp_path / "opus.vocab.yml").write_text(listed)
    (tmp_path / "decoder.yml").write_text(
        "models:\n  - /home/other/opus.npz\nvocabs: [../opus.vocab.yml, ../opus.vocab.yml]\n"
        "beam-size: 6\nnormalize: 0.6\nword-penalty: 0.1\n"
    )
    lines = list(import_run(tmp_path, tmp_path / "run"))
    assert "not followed: word-penalty = 0.1" in lines
    translator = Translator.load(tmp_path / "run")
    assert (translator.settings.beam, translator.settings.length_penalty) == (6, 0.6)
    table, side = state_of(tmp_path / "run")["src_embedding.table.weight"], translator.tokenizers.src
    for i in side.encode(LINES[0]):
        assert torch.equal(table[i], torch.from_numpy(weights(c)["Wemb"][ids[side.pieces([i])[0]]]))


_USUAL = config(tied_embeddings_all=True, **RNN)
"""The settings of `make_folder`."""


def _edited(before: bytes, after: bytes) -> Callable[[Path], None]:
    """Replace bytes of the file."""

    def damage(path: Path) -> None:
        content = path.read_bytes()
        assert before in content and len(before) == len(after)
        path.write_bytes(content.replace(before, after))

    return damage


def _with_decoder(text: str) -> Callable[[Path], None]:
    """Write a decoder.yml for the model."""
    return lambda path: path.with_name("decoder.yml").write_text(f"models: [{path.name}]\n{text}\n")


def _header(position: int, value: int) -> Callable[[Path], None]:
    """Set a number of 64 bits in the header."""

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        struct.pack_into("<Q", content, position, value)
        path.write_bytes(content)

    return damage


def _rewritten(**options: Any) -> Callable[[Path], None]:
    """Write a model with other settings than its weights'."""
    changed = {**_USUAL, **{name.replace("_", "-"): value for name, value in options.items()}}
    return lambda path: write_bin(path, changed, weights(_USUAL))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1000]), "truncated"),
    "too many tensors": (_header(8, 1 << 60), "truncated"),
    "an endless name": (_header(16, 1 << 62), "truncated"),
    "an endless shape": (_header(32, 1 << 62), "truncated"),
    "endless data": (_header(40, 1 << 62), "truncated"),
    "packed for FBGEMM": (_header(24, 0x1801), "FBGEMM"),
    "no settings": (_edited(b"special:model.yml", b"special:model.abc"), "it has no special:model.yml"),
    "nested settings": (_edited(b"enc-depth: 2", b"enc-d: {a: b"), "is damaged: line"),
    "a number that is not finite": (_edited(weights(_USUAL)["Wemb"].tobytes()[:4], b"\0\0\xc0\x7f"), "not finite"),
    "another type": (_rewritten(type="s2s"), "type = 's2s'"),
    "average attention": (_rewritten(type="amun", transformer_ffn_depth=3), "transformer-ffn-depth = 3"),
    "gated units": (_rewritten(dec_cell="gru"), "dec-cell = 'gru'"),
    "no final norm": (_rewritten(transformer_preprocess="n"), "pre-norm"),
    "pre-norm of an old version": (_rewritten(version="v1.9.56", **PRE), "before 1.10.24"),
    "gelu of an old version": (_rewritten(version="v1.11.0", transformer_ffn_activation="gelu"), "before 1.12.3"),
    "one vocabulary": (_rewritten(dim_vocabs=[64]), "dim-vocabs"),
    "other sizes": (_rewritten(enc_depth=3), "encoder_l3_self_Wq [32, 32]"),
    "a huge vocabulary": (_rewritten(dim_vocabs=[1 << 40, 1 << 40]), "dim-vocabs"),
    "factors": (_with_decoder("vocabs: [a.fsv, a.fsv]"), "not *.fsv"),
    "no vocabulary": (lambda path: path.with_name("vocab.ende.spm").unlink(), "needs the vocabularies"),
    "another vocabulary": (lambda path: path.with_name("vocab.ende.spm").write_bytes(pieces(80)), "ids outside 0 .."),
    "two models": (lambda path: write_npz(path.with_name("b.npz"), config(), {}), "2 models"),
}  # fmt: skip


@pytest.mark.parametrize("damage", REFUSED)
def test_damaged_and_unsupported_models_are_refused(tmp_path: Path, damage: str) -> None:
    folder = make_folder(tmp_path / "models")
    change, message = REFUSED[damage]
    change(folder / "model.ende.intgemm.alphas.bin")
    with pytest.raises(UserError, match=re.escape(message)) as error:
        list(import_run(folder, tmp_path / "run"))
    assert "\n" not in str(error.value) and [path.name for path in tmp_path.iterdir()] == ["models"]


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (lambda path, c, w: write_npz(path, c, {"Wemb": np.array([{}], object)}), "Object arrays"),
        (lambda path, c, w: write_npz(path, c, {"Wemb": np.array(["a"])}), "not a model of Marian"),
        (lambda path, c, w: path.write_bytes(b"PK"), "not a model of Marian"),
    ],
)
def test_unusual_npz_files_are_refused(tmp_path: Path, save: Callable[..., None], message: str) -> None:
    c = config(tied_embeddings_all=True)
    (tmp_path / "vocab.spm").write_bytes(pieces())
    save(tmp_path / "model.npz", c, weights(c))
    with pytest.raises(UserError, match=message):
        list(import_run(tmp_path / "model.npz", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(shutil.which("pymarian") is None, reason="needs pymarian, of 1 GB: pip install pymarian")
@pytest.mark.loopback  # of the libraries that pymarian imports
@pytest.mark.parametrize("options", [{}, RNN], ids=["attention", "SSRU"])
@pytest.mark.parametrize("kind", ["float32", "intgemm16"])
def test_marian_gives_the_same_translations(tmp_path: Path, options: dict[str, Any], kind: str) -> None:
    """Marian's converter, search with 5 beams and scores. In 8 bits it rounds activations too."""
    c = config(tied_embeddings_all=True, **options)
    w = weights(c)
    w["decoder_ff_logit_out_b"][0, 0] = 9  # so that most searches end
    write_npz(tmp_path / "model.npz", c, w)
    (tmp_path / "vocab.spm").write_bytes(pieces())

    def marian(*arguments: str, stdin: str = "") -> str:
        command = ["pymarian", *arguments]
        return subprocess.run(command, input=stdin, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    marian("convert", "-f", "model.npz", "-t", "model.bin", "-g", kind)
    list(import_run(tmp_path / "model.bin", tmp_path / "run"))
    texts = LINES[::6]
    usual = ["-v", "vocab.spm", "vocab.spm", "--cpu-threads", "1", "--quiet", "-w", "100", "-m", "model.bin"]
    search = ["-b", "5", "--n-best", "--no-spm-decode", "--max-length-factor", "2"]
    rows = marian("decode", *usual, *search, stdin="\n".join(texts) + "\n")
    best = {int(row[0]): row for row in reversed([line.split(" ||| ") for line in rows.splitlines()])}
    translator = Translator.load(tmp_path / "run")
    found = translator.translate(texts, beam=5, length_penalty=0, split=False)
    limits = [2 * (len(translator.tokenizers.src.encode(text)) + 1) for text in texts]
    ended = [i for i, row in best.items() if found[i].finished and len(row[1].split()) < limits[i] - 1]
    assert len(ended) >= 3  # the others reach the limit, which is handled differently
    for i in ended:
        assert translator.tokenizers.tgt.pieces(found[i].ids) == best[i][1].split()
        assert found[i].log_prob == pytest.approx(float(best[i][-1]), abs=1e-3 if kind == "float32" else 0.1)
