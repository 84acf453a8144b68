"""Import and export of Marian folders without transformers: round trips, refusals and their messages."""

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from marians import change, make_folder, make_run, state_of
from transduce.convert.exporting import export_run
from transduce.convert.importing import import_run
from transduce.convert.parity import compare, settle
from transduce.convert.seq2seq import import_seq2seq
from transduce.convert.weight_map import NEVER
from transduce.errors import TransduceError, UserError
from transduce.nn.positions import halves, sinusoids
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
        list(import_run(folder, run))
    assert caught.value.exit_code == 2 and not run.exists()
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    return str(caught.value)


def test_the_run_folder_is_complete(folder: Path, tmp_path: Path) -> None:
    lines = list(import_run(folder, tmp_path / "run"))
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
    list(import_run(copy, copy.parent / "run"))
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


def _not_a_number(path: Path) -> None:
    tensors = load_file(path)
    tensors["model.shared.weight"][3, 3] = float("nan")
    save_file(tensors, path)


def _upright_bias(path: Path) -> None:
    tensors = load_file(path)
    tensors["final_logits_bias"] = tensors["final_logits_bias"].t().contiguous()
    save_file(tensors, path)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"


def _pointer(path: Path) -> None:
    path.write_text(POINTER)


def _untied(path: Path) -> None:
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.shared.weight"] + 1
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("model.safetensors", Path.unlink, "neither model.safetensors nor pytorch_model.bin"),
        ("model.safetensors", _cut, "model.safetensors is damaged"),
        ("model.safetensors", _not_a_number, "not finite numbers of 16, 32 or 64 bits: model.shared.weight"),
        ("model.safetensors", _untied, "differ: model.shared.weight and lm_head.weight"),
        ("model.safetensors", _upright_bias, "1 misshapen: final_logits_bias is"),
        ("model.safetensors", _pointer, "pointers of Git LFS in place of model.safetensors; download them"),
        ("source.spm", _pointer, "pointers of Git LFS in place of source.spm"),
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
def test_damaged_file_is_named(
    copy: Path, capfd: pytest.CaptureFixture[str], name: str, harm: Callable[[Path], object], said: str
) -> None:
    harm(copy / name)
    assert said in refused(copy)
    assert capfd.readouterr() == ("", ""), "a library adds nothing to the error"


def test_pointers_of_git_lfs_in_files_that_are_not_read_are_no_error(copy: Path) -> None:
    _pointer(copy / "tf_model.h5")
    assert list(import_run(copy, copy.parent / "run"))


def test_a_folder_without_a_model_is_refused_with_the_formats_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert all(name in refused(tmp_path / "empty") for name in ("config.json is missing", "model.bin", "*.npz"))


def test_pickled_tensors_are_read(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.shared.weight"]
    torch.save(tensors, copy / "pytorch_model.bin")
    list(import_run(copy, copy.parent / "safe"))
    (copy / "model.safetensors").unlink()
    list(import_run(copy, copy.parent / "pickled"))
    safe, pickled = (state_of(copy.parent / name) for name in ("safe", "pickled"))
    assert all(torch.equal(safe[name], pickled[name]) for name in safe)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_weights_in_several_files_are_read(copy: Path, kind: str) -> None:
    list(import_run(copy, copy.parent / "whole"))
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    stem = "model" if kind == "safetensors" else "pytorch_model"
    shards = {name: f"{stem}-0000{1 + i % 2}-of-00002.{kind}" for i, name in enumerate(tensors)}
    for shard in set(shards.values()):
        part = {name: tensor for name, tensor in tensors.items() if shards[name] == shard}
        (save_file if kind == "safetensors" else torch.save)(part, copy / shard)
    index = copy / f"{stem}.{kind}.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    list(import_run(copy, copy.parent / "run"))
    whole, found = (state_of(copy.parent / name) for name in ("whole", "run"))
    assert all(torch.equal(whole[name], found[name]) for name in whole)
    assert all(shard in (copy.parent / "run" / "README.md").read_text() for shard in shards.values())
    shutil.rmtree(copy.parent / "whole")
    shutil.rmtree(copy.parent / "run")
    index.write_text(json.dumps({"weight_map": {"a": "../secret.bin"}}))
    assert "does not list files" in refused(copy)
    index.write_text(json.dumps({"weight_map": shards}))
    (copy / next(iter(shards.values()))).unlink()
    assert "-of-00002" in refused(copy)


def test_sinusoids_in_older_files_are_left_out(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.encoder.embed_positions.weight"] = sinusoids(64, 16)[:, halves(16)].contiguous()
    save_file(tensors, copy / "model.safetensors")
    assert list(import_run(copy, copy.parent / "run"))


def test_a_model_whose_outputs_differ_from_those_of_transformers_is_refused(copy: Path) -> None:
    pytest.importorskip("transformers")
    tensors = load_file(copy / "model.safetensors")
    tensors["model.encoder.embed_positions.weight"] = torch.zeros(64, 16)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(TransduceError, match="not the same: outputs of transformers"):
        list(import_run(copy, copy.parent / "run"))
    assert not (copy.parent / "run").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_may_not_be_read_is_refused(copy: Path) -> None:
    copy.chmod(0)
    try:
        assert "cannot read" in refused(copy) and "Permission denied" in refused(copy)
    finally:
        copy.chmod(0o700)


def test_weights_that_overflow_are_refused(copy: Path) -> None:
    pytest.importorskip("transformers")
    tensors = load_file(copy / "model.safetensors")
    save_file({name: tensor * 1e30 for name, tensor in tensors.items()}, copy / "model.safetensors")
    assert "not finite" in refused(copy)


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
        (lambda: import_run(tmp_path / "none", tmp_path / "x"), "there is no folder"),
        (lambda: import_run("a" * 300, tmp_path / "x"), "cannot read a.*too long"),
        (lambda: import_run(folder, folder), "exists already"),
        (lambda: export_run(tmp_path, "hugingface", tmp_path / "x"), "did you mean 'huggingface'"),
        (lambda: export_run(tmp_path, "huggingface", tmp_path / "x", quantization="int8"), "huggingface has none"),
        (lambda: export_run(tmp_path / "typo", "huggingface", tmp_path / "new" / "x"), "typo"),
    ):
        with pytest.raises(UserError, match=said):
            list(call())
    assert not list(tmp_path.iterdir()), "no folder is made"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"residual": "pre"}, "model.residual = 'pre' (there: 'post')"),
        ({"residual": "pre", "positions": "learned", "embedding_norm": True}, "model.residual = 'pre' (there: 'post')"),
        ({"norm": "rms", "positions": "rotary"}, "model.norm = 'rms'"),
        ({"positions": "learned"}, "model.positions = 'learned'"),
        ({"feed_forward": "gated"}, "model.feed_forward = 'gated'"),
        ({"bias": False}, "model.bias = False"),
        ({"n_kv_heads": 2}, "model.n_kv_heads = 2"),
        ({"d_key": 2}, "model.d_key = 2"),
        ({"d_value": 2}, "model.d_value = 2"),
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


def test_pieces_without_an_id_are_noted_and_refused_if_there_are_many(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "marian", make_run(tmp_path / "run"))
    listed = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    ordinary = [piece for piece in listed if not piece.startswith("<")]
    for n, message in (
        (3, r"3 of \d+ pieces of source.spm have no id in vocab.json"),
        (len(ordinary) // 2, "not of one"),
    ):
        renamed = {f"#{piece}" if piece in ordinary[:n] else piece: i for piece, i in listed.items()}
        (folder / "vocab.json").write_text(json.dumps(renamed), encoding="utf-8")
        if message == "not of one":
            with pytest.raises(UserError, match=message):
                import_seq2seq(folder)
        else:
            assert any(re.match(message, note) for note in import_seq2seq(folder).notes)


def test_ruled_out_logits_need_only_be_ruled_out() -> None:
    ours = torch.tensor([1.0, -40.0, NEVER, NEVER + 3])
    assert compare([(torch.tensor([1.5, -40.0, NEVER * 2, NEVER]), ours)]) == (0.5, 40.0)
    assert compare([(torch.tensor([1.0, -40.0, 0.0, NEVER]), ours)])[0] == math.inf
    bad = torch.tensor([math.nan, -40.0, NEVER, NEVER])
    assert compare([(ours, ours), (bad, ours), (ours, ours)]) == (math.inf, 40.0)


def test_comparing_nothing_fails() -> None:
    with pytest.raises(AssertionError, match="nothing was compared"):
        compare([])


def test_the_bound_grows_with_large_logits_only() -> None:
    assert settle("x", (0.9e-4, 30.0)).endswith("largest difference 9.0e-05 (bound 1e-04)")
    assert settle("x", (2.9e-4, 96.0)).endswith("largest difference 2.9e-04 (bound 3e-04)")
    for difference, size in ((1.1e-4, 10.0), (3.1e-4, 96.0), (math.inf, 0.0), (math.nan, 0.0)):
        with pytest.raises(TransduceError, match="not the same"):
            settle("x", (difference, size))
