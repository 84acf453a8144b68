"""Models of CTranslate2 and packages of Argos Translate: import, and export back, compared with the library itself.

TRANSDUCE_MODELS=N: that many models of each kind with random settings.
"""

import argparse
import json
import os
import random
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from torch import Tensor

import seq2seqs
from marians import LINES, change, make_folder, make_run, tokenizers
from system.commands import transduce
from transduce.convert import parity
from transduce.convert.exporting import export_run
from transduce.convert.importing import import_run
from transduce.data.store import Example
from transduce.decoding.translator import Translator
from transduce.errors import TransduceError, UserError
from transduce.runs.folder import RunFolder

engine = pytest.importorskip("ctranslate2")
pytestmark = [
    pytest.mark.usefixtures("few_pieces"),
    pytest.mark.filterwarnings("ignore:.*sacremoses"),
]

N_MODELS = int(os.environ.get("TRANSDUCE_MODELS", "2"))
SETTINGS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "pre": {"residual": "pre"},
    "learned": {"positions": "learned"},
    "no positions": {"positions": "none"},
    "modern": {"residual": "pre", "norm": "rms", "feed_forward": "gated", "activation": "silu"},
    "halves, bias": {"positions": "sinusoidal_halves", "output_bias": True, "activation": "gelu_tanh"},
    "normed embeddings": {"embedding_norm": True, "activation": "gelu"},
    "no bias, unscaled": {"bias": False, "scale_embeddings": False, "norm_eps": 1e-3},
    "untied": {"tie": "none"},
    "source without its end": {"source_end": False},
}


def their_pieces(folder: Path, model: Path, texts: list[str], *, end: bool, beam: int = 1) -> list[list[str]]:
    """The library's translations of texts, whose pieces end with the end of a sentence or not."""
    splitter = sentencepiece.SentencePieceProcessor(model_file=str(model))
    sources = [splitter.encode(text, out_type=str) + ["</s>"] * end for text in texts]
    translator = engine.Translator(str(folder), compute_type="float32")  # which also rounds no activations to 8 bits
    as_ours = {"disable_unk": True, "min_decoding_length": 0}
    found = translator.translate_batch(sources, beam_size=beam, max_decoding_length=10, **as_ours)
    return [result.hypotheses[0] for result in found]


def our_pieces(run: Path, texts: list[str], **languages: str) -> list[list[str]]:
    translator = Translator.load(run)
    translator = translator.between(*languages.values()) if languages else translator
    translations = translator.translate(texts, beam=1, max_length=10, split=False)
    return [translator.tokenizers.tgt.pieces(translation.ids) for translation in translations]


def test_ctranslate2_quantization_and_unsupported_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    lines = list(export_run(run, "ctranslate2", tmp_path / "int8", quantization="int8"))
    assert "int8 moves" in lines[2]
    with pytest.raises(TransduceError, match="allowed are int8"):
        list(export_run(run, "ctranslate2", tmp_path / "x", quantization="int7"))
    other = make_run(tmp_path / "other", positions="rotary")
    with pytest.raises(TransduceError, match=r"model\.positions = 'rotary'"):
        list(export_run(other, "ctranslate2", tmp_path / "x"))
    monkeypatch.setattr(parity, "BOUND", 0.0)
    with pytest.raises(TransduceError, match="not the same"):
        list(export_run(run, "ctranslate2", tmp_path / "x"))
    assert not (tmp_path / "x").exists()


QUANTIZED = ("the paper's", "learned", "modern", "untied")  # tables and matrices of every form


@pytest.mark.parametrize(
    ("name", "quantization"),
    [*((name, None) for name in SETTINGS), *((name, q) for q in ("int8", "int16", "float16") for name in QUANTIZED)],
)
def test_an_export_translates_alike_and_is_imported_again(tmp_path: Path, name: str, quantization: str | None) -> None:
    options = SETTINGS[name]
    run = make_run(tmp_path / "run", joint=options.get("tie") != "none", **options)
    lines = list(export_run(run, "ctranslate2", tmp_path / "theirs", quantization=quantization))
    assert "checked: log-probabilities" in lines[1]
    lines = list(import_run(tmp_path / "theirs", tmp_path / "again"))
    assert any("checked: log-probabilities" in line for line in lines), lines

    settings = [RunFolder.open(path).settings.model.model_dump() for path in (run, tmp_path / "again")]
    kept = ("tie", "norm", "residual", "feed_forward", "activation", "embedding_norm", "source_end")
    kept += ("positions",) if quantization != "float16" else ()  # rounded sinusoids are learned positions
    assert [settings[0][key] for key in kept] == [settings[1][key] for key in kept]
    if quantization is None:
        expected = their_pieces(tmp_path / "theirs", tmp_path / "theirs" / "source.spm", LINES[::6], end=False)
        assert our_pieces(run, LINES[::6]) == our_pieces(tmp_path / "again", LINES[::6]) == expected


def drawn(draw: random.Random, *, joint: bool) -> dict[str, Any]:
    """Random settings that CTranslate2 supports."""
    heads = draw.choice([1, 2, 4])
    return {
        "n_heads": heads,
        "d_model": heads * draw.choice([4, 6, 8]),
        "d_ff": draw.choice([5, 24, 33]),
        "n_encoder_layers": draw.randint(1, 3),
        "n_decoder_layers": draw.randint(1, 3),
        "residual": draw.choice(["post", "pre"]),
        "norm": draw.choice(["layer", "rms"]),
        "norm_eps": draw.choice([None, 1e-3]),
        "feed_forward": draw.choice(["plain", "gated"]),
        "activation": draw.choice(["relu", "gelu", "gelu_tanh", "silu"]),
        "embedding_norm": draw.random() < 0.3,
        "bias": draw.random() < 0.7,
        "scale_embeddings": draw.random() < 0.5,
        "output_bias": draw.random() < 0.5,
        "source_end": draw.random() < 0.7,
        "positions": draw.choice([*(f"sinusoidal{kind}" for kind in ("", "_halves", "_marian")), "learned", "none"]),
        "tie": draw.choice(["three_way", "two_way", "inputs", "none"] if joint else ["two_way", "none"]),
    }


@pytest.mark.parametrize("seed", range(N_MODELS))
def test_models_with_random_settings_are_exported_and_imported_again(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    joint = draw.random() < 0.6
    run = make_run(tmp_path / "run", joint=joint, seed=seed, **drawn(draw, joint=joint))
    lines = list(export_run(run, "ctranslate2", tmp_path / "theirs"))
    assert "checked: log-probabilities" in lines[1]
    lines = list(import_run(tmp_path / "theirs", tmp_path / "again"))
    assert any("checked: log-probabilities" in line for line in lines), lines
    expected = their_pieces(tmp_path / "theirs", tmp_path / "theirs" / "source.spm", LINES[::6], end=False)
    assert our_pieces(run, LINES[::6]) == our_pieces(tmp_path / "again", LINES[::6]) == expected


@pytest.mark.parametrize("trainable", [False, True], ids=["native", "PyTorch"])
def test_a_source_without_its_end_gives_the_librarys_translations(tmp_path: Path, trainable: bool) -> None:
    run = make_run(tmp_path / "run", source_end=False)
    list(export_run(run, "ctranslate2", tmp_path / "theirs"))
    expected = their_pieces(tmp_path / "theirs", tmp_path / "theirs" / "source.spm", LINES[::6], end=False)
    translator = Translator.load(run, trainable=trainable)
    translations = translator.translate(LINES[::6], beam=1, max_length=10, split=False)
    assert [translator.tokenizers.tgt.pieces(translation.ids) for translation in translations] == expected


@pytest.mark.parametrize("language_last", [False, True])
def test_both_engines_agree_on_a_source_without_its_end(tmp_path: Path, language_last: bool) -> None:
    """Scores, attention (the end, which is not read, has no weight) and the scores of an empty source."""
    run = make_run(tmp_path / "run", source_end=False, positions="learned", language_last=language_last)
    native, pytorch = (Translator.load(run, trainable=trainable).engine for trainable in (False, True))
    pairs = [Example([7, 9, 12], [8, 11]), Example([7], []), Example([], [9])]
    for ours, theirs in zip(native.score(pairs), pytorch.score(pairs), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    for ours, theirs in zip(native.attention(pairs[:2], [(0, 1)]), pytorch.attention(pairs[:2], [(0, 1)]), strict=True):
        assert ours.shape == theirs.shape and ours == pytest.approx(theirs, abs=1e-5) and not ours[..., -1].any()


@pytest.mark.parametrize("seed", range(N_MODELS))
def test_marian_models_converted_by_the_library(tmp_path: Path, seed: int) -> None:
    settings = drawn(random.Random(seed), joint=True)
    names = ("n_heads", "d_model", "d_ff", "n_encoder_layers", "n_decoder_layers", "activation", "scale_embeddings")
    options = {name: settings[name] for name in names} | {"positions": "sinusoidal_halves"}
    marian = make_folder(tmp_path / "marian", make_run(tmp_path / "run", seed=1 + seed, **options))
    converter = engine.converters.TransformersConverter(str(marian), copy_files=["source.spm", "target.spm"])
    converter.convert(str(tmp_path / "theirs"), quantization="int8")
    lines = list(import_run(tmp_path / "theirs", tmp_path / "ours"))
    assert any("checked" in line for line in lines), lines
    expected = their_pieces(tmp_path / "theirs", marian / "source.spm", LINES[::6], end=True)
    assert our_pieces(tmp_path / "ours", LINES[::6]) == expected


@pytest.mark.parametrize("seed", range(N_MODELS))
def test_models_of_many_languages_converted_by_the_library(tmp_path: Path, seed: int) -> None:
    seq2seqs.write_model(tmp_path / "hub", "nllb", 3 + seed)
    converter = engine.converters.TransformersConverter(str(tmp_path / "hub"), copy_files=["sentencepiece.bpe.model"])
    converter.convert(str(tmp_path / "theirs"))
    lines = list(import_run(tmp_path / "theirs", tmp_path / "ours"))
    assert any("checked" in line for line in lines), lines
    list(import_run(tmp_path / "hub", tmp_path / "same"))
    languages = {"src_lang": "en", "tgt_lang": "de"}
    ours, same = (our_pieces(tmp_path / name, LINES[::9], **languages) for name in ("ours", "same"))
    # rows without a piece have a name in the library's vocabulary
    assert [[re.sub(r"madeupword\d+|<unnamed \d+>", "", piece) for piece in row] for row in ours] == [
        [re.sub(r"<unnamed \d+>", "", piece) for piece in row] for row in same
    ]


def opennmt_checkpoint(path: Path, pieces: list[str], *, d: int = 16, ff: int = 24) -> None:
    """A checkpoint as OpenNMT-py 3 writes it: pre-norm, no biases of queries, keys and values, no end of the source."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    model, norms = dict[str, Tensor](), ["encoder.layer_norm", "decoder.layer_norm"]
    frequencies = torch.exp(torch.arange(0, d, 2) * -(torch.log(torch.tensor(10000.0)) / d))
    angles = torch.arange(0, 50).unsqueeze(1) * frequencies
    table = torch.stack([angles.sin(), angles.cos()], 2).flatten(1).unsqueeze(1)
    for side, layers, attentions in (("encoder", "transformer", 1), ("decoder", "transformer_layers", 2)):
        model[f"{side}.embeddings.make_embedding.pe.pe"] = table
        model[f"{side}.embeddings.make_embedding.emb_luts.0.weight"] = random(len(pieces), d)
        layer = f"{side}.{layers}.0"
        for name in ("self_attn", "context_attn")[:attentions]:
            for part in ("linear_query", "linear_keys", "linear_values", "final_linear"):
                model[f"{layer}.{name}.{part}.weight"] = random(d, d)
        for part, shape in (("w_1", (ff, d)), ("w_2", (d, ff))):
            model |= {f"{layer}.feed_forward.{part}.weight": random(*shape)}
            model |= {f"{layer}.feed_forward.{part}.bias": random(shape[0])}
        norms += [f"{layer}.feed_forward.layer_norm"]
        norms += [f"{layer}.layer_norm"] if attentions == 1 else [f"{layer}.layer_norm_{i}" for i in (1, 2)]
    for name in norms:
        model |= {f"{name}.weight": 1 + random(d), f"{name}.bias": random(d)}
    heads = {"weight": random(len(pieces), d), "bias": random(len(pieces))}
    options = {
        "encoder_type": "transformer",
        "decoder_type": "transformer",
        "enc_layers": 1,
        "dec_layers": 1,
        "heads": 2,
    }
    options |= {"position_encoding": True, "pos_ffn_activation_fn": "relu"}
    vocabulary, namespace = {"src": pieces, "tgt": pieces}, argparse.Namespace(**options)
    torch.save({"model": model, "generator": heads, "vocab": vocabulary, "opt": namespace}, path)


def write_package(folder: Path) -> Path:
    """Write a package of Argos Translate, as argos-train makes it: OpenNMT-py, CTranslate2, SentencePiece, zip."""
    folder.mkdir(exist_ok=True)
    model = tokenizers().src.model
    (folder / "sentencepiece.model").write_bytes(model)
    splitter = sentencepiece.SentencePieceProcessor(model_proto=model)
    names = [splitter.id_to_piece(i) for i in range(4, splitter.vocab_size())]
    opennmt_checkpoint(folder / "model.pt", ["<unk>", "<blank>", "<s>", "</s>", *names])
    converter = engine.converters.OpenNMTPyConverter(str(folder / "model.pt"), unsafe_deserialization=True)
    converter.convert(str(folder / "model"), quantization="int8")
    metadata = {"package_version": "1.9", "argos_version": "1.9", "from_code": "en", "to_code": "de"}
    (folder / "metadata.json").write_text(json.dumps(metadata | {"from_name": "English", "to_name": "German"}))
    (folder / "README.md").write_text("# English to German\n")
    out = folder / "translate-en_de-1_9.argosmodel"
    with zipfile.ZipFile(out, "w") as archive:
        for name in (
            "metadata.json",
            "README.md",
            "sentencepiece.model",
            *(f"model/{p.name}" for p in (folder / "model").iterdir()),
        ):
            archive.write(folder / name, f"en_de/{name}")
        archive.writestr("en_de/stanza/en/pickle.pt", b"not read")
    return out


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_package(tmp_path_factory.mktemp("argos"))


def test_a_package_of_argos_translate_is_imported(package: Path, tmp_path: Path) -> None:
    lines = list(import_run(package, tmp_path / "run"))
    assert any("checked" in line for line in lines) and any("a source has no </s>" in line for line in lines), lines
    run = Translator.load(tmp_path / "run")
    assert run.languages == ("en", "de")
    expected = their_pieces(package.parent / "model", package.parent / "sentencepiece.model", LINES[::6], end=False)
    assert our_pieces(tmp_path / "run", LINES[::6]) == expected
    assert "in the format of CTranslate2" in (tmp_path / "run" / "README.md").read_text()
    done = transduce("translate", tmp_path / "run", stdin="a man reads books .\n")
    assert done.code == 0 and done.out.count("\n") == 1


def test_only_codes_of_languages_are_taken_from_a_package(package: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(package) as archive:
        archive.extractall(tmp_path)
    change(tmp_path / "en_de" / "metadata.json", from_code="../en\n", to_code=["de"])
    list(import_run(tmp_path / "en_de", tmp_path / "run"))
    assert RunFolder.open(tmp_path / "run").settings.data.named_languages == (None, None)


def test_a_run_becomes_a_package_of_argos_translate(package: Path, tmp_path: Path) -> None:
    list(import_run(package, tmp_path / "run"))
    lines = list(export_run(tmp_path / "run", "argos", tmp_path / "out.argosmodel"))
    assert "checked" in lines[1]
    with zipfile.ZipFile(tmp_path / "out.argosmodel") as archive:
        archive.extractall(tmp_path / "packages")
    [folder] = (tmp_path / "packages").iterdir()
    metadata = json.loads((folder / "metadata.json").read_text())
    assert (metadata["from_code"], metadata["to_code"], metadata["to_name"]) == ("en", "de", "German")
    texts = LINES[::6]
    expected = our_pieces(tmp_path / "run", texts)
    assert their_pieces(folder / "model", folder / "sentencepiece.model", texts, end=False) == expected
    list(import_run(tmp_path / "out.argosmodel", tmp_path / "again"))
    assert our_pieces(tmp_path / "again", texts) == expected
    with pytest.raises(UserError, match=r"data\.src_lang"):
        list(export_run(make_run(tmp_path / "nameless"), "argos", tmp_path / "x.argosmodel"))
    assert not (tmp_path / "x.argosmodel").exists()


_FLAG = b"alibi_use_positive_positions\0\0\1\1\0\0\0"
DAMAGE = {  # a file, what replaces a part of it (or all of it), and a part of the error
    "truncated": ("model.bin", None, b"\6\0\0\0\x10\0TransformerSpec\0", "model.bin is damaged"),
    "of another program": ("model.bin", None, b"PK" * 500, "version"),
    "another kind": ("model.bin", b"TransformerSpec", b"WhisperABCDSpec", "WhisperABCDSpec"),
    "alibi": ("model.bin", _FLAG + b"\0", _FLAG + b"\1", "alibi_use"),
    "not a list": ("shared_vocabulary.json", None, b"{}", "not a list"),
    "another vocabulary": ("shared_vocabulary.json", None, b'["<unk>", "</s>", "<s>"]', "misshapen"),
    "broken pieces": ("source.spm", None, b"spm", r"source\.spm is damaged"),
    "broken config": ("config.json", None, b"{", r"config\.json"),
    "another start": ("config.json", b'"decoder_start_token": "<s>"', b'"decoder_start_token": "x y"', "lacks x y"),
    "no vocabulary": ("shared_vocabulary.json", None, None, "has no vocabulary"),
    "no pieces": ("source.spm", None, None, "has no SentencePiece model"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_and_unsupported_models_are_refused(tmp_path: Path, case: str) -> None:
    list(export_run(make_run(tmp_path / "run"), "ctranslate2", tmp_path / "theirs"))
    name, old, new, message = DAMAGE[case]
    path = tmp_path / "theirs" / name
    content = path.read_bytes()
    path.unlink()
    if new is not None:
        path.write_bytes(new if old is None else content.replace(old, new))
        assert path.read_bytes() != content
    with pytest.raises(UserError, match=message) as caught:
        list(import_run(tmp_path / "theirs", tmp_path / "again"))
    assert "\n" not in str(caught.value) and not (tmp_path / "again").exists()


def test_pipes_are_refused(tmp_path: Path) -> None:
    for name in ("theirs/model.bin", "package.argosmodel"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=r"model\.bin is no regular file"):
        list(import_run(tmp_path / "theirs", tmp_path / "run"))
    with pytest.raises(UserError, match=r"package\.argosmodel is neither a folder nor a package"):
        list(import_run(tmp_path / "package.argosmodel", tmp_path / "run"))


def test_damaged_packages_are_refused(package: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.argosmodel"
    broken.write_bytes(package.read_bytes()[:-2000])
    with pytest.raises(UserError, match=r"broken\.argosmodel is damaged, or not a package"):
        list(import_run(broken, tmp_path / "run"))
    with zipfile.ZipFile(broken, "w") as archive:
        archive.writestr("../../metadata.json", "{}")
        archive.writestr("x/bpe.model", "")
        archive.writestr("x/metadata.json", "{}")
    with pytest.raises(UserError, match=r"bpe\.model, which is not supported"):
        list(import_run(broken, tmp_path / "run"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.argosmodel"]
