"""Import and export of Marian folders without transformers: round trips, refusals and their messages."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from marians import LINES, change, make_folder, make_run, state_of
from transduce.config.decoding import DecodingOptions
from transduce.convert.exporting import export_run
from transduce.convert.importing import import_run
from transduce.decoding.translator import Translator
from transduce.errors import UserError
from transduce.runs.folder import RunFolder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("marian")
    return make_folder(path / "theirs", make_run(path / "run"))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def refused(folder: Path) -> str:
    """The message of a refused import, which leaves no files."""
    run = folder.parent / "run"
    with pytest.raises(UserError) as caught:
        list(import_run("marian", folder, run))
    assert caught.value.exit_code == 2 and not run.exists()
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    return str(caught.value)


@pytest.mark.parametrize(
    ("joint", "options"),
    [
        (True, {}),
        (True, {"positions": "sinusoidal_halves", "output_bias": True}),
        (True, {"tie": "two_way", "activation": "silu", "scale_embeddings": False}),
        (False, {"tie": "two_way"}),
        (False, {"tie": "none", "activation": "gelu_tanh", "d_model": 12}),
    ],
)
def test_round_trip_is_bit_identical(tmp_path: Path, joint: bool, options: dict[str, Any]) -> None:
    run = make_run(tmp_path / "run", joint=joint, **options)
    list(import_run("marian", make_folder(tmp_path / "theirs", run), tmp_path / "again"))
    before, after = state_of(run), state_of(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    ours, theirs = (Translator.load(path) for path in (run, tmp_path / "again"))
    texts = [*LINES[::7], "xyz 猫 ⁇ A"]
    found = [t.translate(texts, DecodingOptions(beam=3, n_best=2, max_length=12)) for t in (ours, theirs)]
    assert found[0] == found[1]
    assert ours.tokenizers.src.encode_batch(texts) == theirs.tokenizers.src.encode_batch(texts)


def test_the_run_folder_is_complete(folder: Path, tmp_path: Path) -> None:
    lines = list(import_run("marian", folder, tmp_path / "run"))
    assert "parameters" in lines[0]
    run = RunFolder.open(tmp_path / "run")
    names = {path.name for path in run.path.iterdir()}
    assert {"manifest.json", "config.json", "recipe.toml", "model.safetensors", "README.md"} <= names
    assert {f"tokenizer.{side}.{kind}" for side in ("src", "tgt") for kind in ("model", "json")} <= names
    assert not {name for name in names if name.startswith(".")}
    card = (run.path / "README.md").read_text()
    assert "imported" in card and "sha256" in card and str(folder.parent) not in card
    (run.path / "tokenizer.src.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.src\.json is missing"):
        RunFolder.open(run.path)


def test_search_settings_are_imported(copy: Path) -> None:
    change(copy / "generation_config.json", num_beams=7, length_penalty=0.5, max_length=40, no_repeat_ngram_size=3)
    list(import_run("marian", copy, copy.parent / "run"))
    decoding = RunFolder.open(copy.parent / "run").settings.decoding
    assert (decoding.beam, decoding.length_penalty, decoding.max_length, decoding.no_repeat_ngram) == (7, 0.5, 39, 3)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "t5", "architectures": ["T5Model"]}, r"T5Model \(model_type t5\); supported.*MarianMTModel"),
        ({"architectures": ["MarianForCausalLM"]}, "MarianForCausalLM"),
        ({"activation_function": "mish"}, "'mish'; supported: relu, gelu"),
        ({"normalize_before": True, "static_position_embeddings": False}, "normalize_before = True.*static_position"),
        ({"encoder_ffn_dim": 25}, "encoder_ffn_dim = 25 and decoder_ffn_dim = 24 differ"),
        ({"d_model": ..., "vocab_size": ...}, "d_model is missing; vocab_size is missing"),
        ({"d_model": "16"}, "'16' is not a size"),
        ({"tie_word_embeddings": False}, "not supported"),
        ({"decoder_start_token_id": 0}, "decoder_start_token_id = 0"),
        ({"dropout": "a"}, "dropout"),
        ({"encoder_attention_heads": 3, "decoder_attention_heads": 3}, "not divisible"),
        ({"vocab_size": 20, "decoder_vocab_size": 20}, r"model\.shared\.weight is \[.*should be \[20, 16\]"),
        ({"eos_token_id": 5}, "</s> with id 5"),
        ({"encoder_layers": 3}, r"16 missing: model\.encoder\.layers\.2\..*"),
        ({"encoder_layers": 1}, r"16 unexpected: model\.encoder\.layers\.1\."),
        (
            {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
            r"9 misshapen: .*fc1\.weight is \[24, 16\], should be \[48, 16\]",
        ),
    ],
)
def test_unsupported_config_is_refused(copy: Path, values: dict[str, Any], said: str) -> None:
    change(copy / "config.json", **values)
    message = refused(copy)
    assert "\n" not in message
    assert re.search(said, message), message


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(content)


def _not_a_number(path: Path) -> None:
    tensors = load_file(path)
    tensors["model.shared.weight"][3, 3] = float("nan")
    save_file(tensors, path)


def _untied(path: Path) -> None:
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.shared.weight"] + 1
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("model.safetensors", Path.unlink, "neither model.safetensors nor pytorch_model.bin"),
        ("model.safetensors", _cut, "model.safetensors is damaged"),
        ("model.safetensors", _flip, "does not match its checksum"),
        ("model.safetensors", _not_a_number, "not finite numbers of 16, 32 or 64 bits: model.shared.weight"),
        ("model.safetensors", _untied, "differ: model.shared.weight and lm_head.weight"),
        ("config.json", Path.unlink, "config.json is missing"),
        ("config.json", _cut, "config.json is damaged"),
        ("source.spm", Path.unlink, "source.spm is missing"),
        ("source.spm", _cut, "source.spm is damaged"),
        ("target.spm", lambda path: path.write_bytes(b""), "target.spm is damaged"),
        ("vocab.json", Path.unlink, "vocab.json is missing"),
        ("vocab.json", lambda path: path.write_text("[]"), "JSON object"),
        ("vocab.json", lambda path: path.write_text('{"a": 0}'), "needs <unk>"),
        ("vocab.json", lambda path: change(path, a=7), "two pieces have one id"),
        ("vocab.json", lambda path: change(path, a="7"), "ids outside"),
    ],
)
def test_damaged_file_is_named(copy: Path, name: str, harm: Callable[[Path], object], said: str) -> None:
    harm(copy / name)
    assert said in refused(copy)


def test_pickled_tensors_are_read(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.shared.weight"]
    torch.save(tensors, copy / "pytorch_model.bin")
    list(import_run("marian", copy, copy.parent / "safe"))
    (copy / "model.safetensors").unlink()
    list(import_run("marian", copy, copy.parent / "pickled"))
    safe, pickled = (state_of(copy.parent / name) for name in ("safe", "pickled"))
    assert all(torch.equal(safe[name], pickled[name]) for name in safe)


def test_sinusoids_in_older_files_are_left_out(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.encoder.embed_positions.weight"] = torch.zeros(64, 16)
    save_file(tensors, copy / "model.safetensors")
    assert list(import_run("marian", copy, copy.parent / "run"))


def test_export_without_transformers_reports_that_it_was_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    lines = list(export_run(run, "huggingface", tmp_path / "new" / "out"))
    assert lines[1].startswith("not checked: transformers is not installed; pip install")
    assert (tmp_path / "new" / "out" / "model.safetensors").exists()
    with pytest.raises(UserError, match="pip install ctranslate2"):
        list(export_run(run, "ctranslate2", tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_wrong_names_and_places_are_refused(folder: Path, tmp_path: Path) -> None:
    for call, said in (
        (lambda: import_run("marain", folder, tmp_path / "x"), "did you mean 'marian'"),
        (lambda: import_run("marian", tmp_path / "none", tmp_path / "x"), "there is no folder"),
        (lambda: import_run("marian", folder, folder), "exists already"),
        (lambda: export_run(tmp_path, "hugingface", tmp_path / "x"), "did you mean 'huggingface'"),
        (lambda: export_run(tmp_path, "huggingface", tmp_path / "x", quantization="int8"), "huggingface has none"),
        (lambda: export_run(tmp_path / "typo", "onnx", tmp_path / "new" / "x"), "typo"),
        (lambda: import_run("gpt2", folder, tmp_path / "new" / "x"), "supported here: model_type gpt2"),
    ):
        with pytest.raises(UserError, match=said):
            list(call())
    assert not list(tmp_path.iterdir()), "no folder is made"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"residual": "pre"}, "model.residual = 'pre' (there: 'post')"),
        ({"norm": "rms", "positions": "rotary"}, "model.norm = 'rms'"),
        ({"positions": "learned"}, "model.positions = 'learned'"),
        ({"feed_forward": "gated"}, "model.feed_forward = 'gated'"),
        ({"bias": False}, "model.bias = False"),
        ({"n_kv_heads": 2}, "model.n_kv_heads = 2"),
        ({"d_key": 2}, "model.d_key = 2"),
        ({"norm_eps": 1e-3}, "model.norm_eps = 0.001"),
        ({"embedding_norm": True}, "model.embedding_norm = True"),
    ],
)
def test_settings_that_marian_cannot_express_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    run = make_run(tmp_path / "run", **options)
    with pytest.raises(UserError) as caught:
        list(export_run(run, "huggingface", tmp_path / "out"))
    assert said in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
