"""Adapters in PEFT's format against transformers' weights plus the products, computed here in float64."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import marians
import seq2seqs
from oracle import test_t5
from system.commands import assert_refused, sets, succeed, transduce
from transduce.convert.exporting import export_run, open_outgoing
from transduce.convert.importing import import_run
from transduce.runs.folder import RunFolder
from transduce.text.tokenizer import load_tokenizers

pytestmark = pytest.mark.usefixtures("few_pieces")
RANK, ALPHA = 3, 5
CONFIG: dict[str, Any] = {  # as PEFT 0.21 writes it
    "alora_invocation_tokens": None, "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "a/b",
    "bias": "none", "corda_config": None, "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False,
    "inference_mode": True, "init_lora_weights": True, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_alpha": ALPHA, "lora_bias": False, "lora_dropout": 0.1,
    "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA",
    "qalora_group_size": 16, "r": RANK, "rank_pattern": {}, "revision": None, "target_modules": ["q_proj"],
    "target_parameters": None, "task_type": "SEQ_2_SEQ_LM", "trainable_token_indices": None, "use_dora": False,
    "use_qalora": False, "use_rslora": False,
}  # fmt: skip
TARGETS = {"m2m": ("q_proj", "v_proj", "fc1"), "marian": ("k_proj", "out_proj", "fc2"), "mt5": ("q", "v", "o", "wi_1")}


def write_base(path: Path, kind: str) -> Any:
    """Write a random model; return it."""
    if kind == "mt5":
        return test_t5.write_model(path, kind, 1)
    if kind == "m2m":
        return seq2seqs.write_model(path, kind, 1)
    # trained here, so that the columns of the exported model have another order
    marians.make_folder(path, marians.make_run(path.with_name("ours"), positions="sinusoidal"))
    return transformers.MarianMTModel.from_pretrained(path)


def add(model: Any, adapters: dict[str, Tensor], scale: float) -> None:
    """Add the products of adapters in PEFT's format to a model."""
    for name, b in adapters.items():
        if ".lora_B." in name:
            weight = model.get_submodule(name.split(".lora_B.")[0].removeprefix("base_model.model.")).weight
            product = b.double() @ adapters[name.replace("lora_B", "lora_A")].double()
            weight.data = (weight.double() + scale * product).float()


def assert_equal(ours: Path, theirs: Path) -> None:
    one, other = (RunFolder.open(run).load_model() for run in (ours, theirs))
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-6)


def imported(source: Path, run: Path, **options: Any) -> Path:
    assert list(import_run(source, run, **options))
    return run


@pytest.mark.parametrize("kind", TARGETS)
def test_imported_adapters_change_the_weights_as_in_transformers(tmp_path: Path, kind: str) -> None:
    model = write_base(tmp_path / "model", kind)
    base = imported(tmp_path / "model", tmp_path / "base")
    generator, adapters = torch.Generator().manual_seed(1), dict[str, Tensor]()
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.rpartition(".")[2] in TARGETS[kind]:
            for part, shape in (("A", (RANK, layer.in_features)), ("B", (layer.out_features, RANK))):
                drawn = 0.1 * torch.randn(shape, generator=generator)
                adapters[f"base_model.model.{name}.lora_{part}.weight"] = drawn
    (tmp_path / "adapters").mkdir()
    save_file(adapters, tmp_path / "adapters" / "adapter_model.safetensors", metadata={"format": "pt"})
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps(CONFIG))
    run = imported(tmp_path / "adapters", tmp_path / "run", base=base)
    add(model, adapters, ALPHA / RANK)
    model.save_pretrained(tmp_path / "model")
    assert_equal(run, imported(tmp_path / "model", tmp_path / "expected"))


@pytest.mark.parametrize("kind", TARGETS)
def test_exported_adapters_change_transformers_weights_as_ours(tmp_path: Path, kind: str) -> None:
    model = write_base(tmp_path / "model", kind)
    imported(tmp_path / "model", tmp_path / "base")
    for side, lines in (("src", ["a dog runs", "a cat"]), ("tgt", ["ein Hund", "eine Katze"])):
        (tmp_path / side).write_text("".join(f"{line}\n" for line in lines * 9))
    languages = ("--src-lang", "en", "--tgt-lang", "fr") if kind == "m2m" else ()
    succeed(
        *("train", "--from", tmp_path / "base", "--src", tmp_path / "src", "--tgt", tmp_path / "tgt", *languages),
        *("--run", tmp_path / "run", *sets("training.lora={ rank = 2, alpha = 3, on = 'all', merge = false }")),
        *sets("training.max_updates=3", "training.lr=0.1", "training.valid_updates=3", "training.average=last"),
        *sets("training.valid_bleu_sentences=0", "data.max_length=30", "decoding.max_length=20"),
    )
    (line,) = list(export_run(tmp_path / "run", "peft", tmp_path / "adapters"))[1:]
    assert "rank 2" in line
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (2, 3, "LORA")
    adapters = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in adapters} == set(config["target_modules"])
    assert any(bool(tensor.any()) for name, tensor in adapters.items() if ".lora_B." in name)
    add(model, adapters, 3 / 2)
    model.save_pretrained(tmp_path / "model")
    assert_equal(tmp_path / "run", imported(tmp_path / "model", tmp_path / "expected"))
    again = imported(tmp_path / "adapters", tmp_path / "again", base=tmp_path / "base")
    assert_equal(tmp_path / "run", again)

    # both runs are moved together; then the initial run is gone, which only kept adapters need
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("run", "base"):
        (tmp_path / name).rename(moved / name)
    list(export_run(moved / "run", "peft", moved / "adapters"))
    assert json.loads((moved / "adapters" / "adapter_config.json").read_text()) == config
    run = RunFolder.open(moved / "run")
    with RunFolder.create(tmp_path / "whole", run.settings, "") as whole:
        whole.save_tokenizers(load_tokenizers(run).save)
        whole.save_model(run.load_model())
    shutil.rmtree(moved / "base")
    assert_refused(transduce("export", moved / "run", tmp_path / "out", "--to", "peft"), "restore that run")
    assert open_outgoing(tmp_path / "whole").adapters == {}


def test_adapters_that_do_not_fit_are_refused_in_one_line(tmp_path: Path) -> None:
    write_base(tmp_path / "model", "marian")
    imported(tmp_path / "model", tmp_path / "base")
    folder = tmp_path / "adapters"
    folder.mkdir()
    name = "base_model.model.model.encoder.layers.0.fc1"

    def refused(*parts: str, config: dict[str, Any] | None = None, base: bool = True) -> None:
        (folder / "adapter_config.json").write_text(json.dumps(CONFIG | (config or {})))
        options = ("--base", tmp_path / "base") if base else ()
        assert_refused(transduce("import", folder, tmp_path / "run", *options), *parts)
        assert not (tmp_path / "run").exists()

    refused("no adapter_model.safetensors")
    tensors = {f"{name}.lora_A.weight": torch.ones(3, 999), f"{name}.lora_B.weight": torch.ones(24, 3)}
    save_file(tensors, folder / "adapter_model.safetensors")
    refused("another model", "fc1", "999")
    refused("a/b", "--base RUN", base=False)
    refused("peft_type = 'IA3'", config={"peft_type": "IA3"})
    refused("modules_to_save = ['lm_head']", config={"modules_to_save": ["lm_head"]})
    refused("r = 4", "another rank", "fc1", config={"r": 4})
    integers = {part: tensor.to(torch.int8) for part, tensor in tensors.items()}
    save_file(integers, folder / "adapter_model.safetensors")
    refused("expected matrices", "fc1")
    save_file({"x.lora_A.weight": torch.ones(3, 3)}, folder / "adapter_model.safetensors")
    refused("lora_A and lora_B", "x")
    done = transduce("import", tmp_path / "model", tmp_path / "run", "--base", tmp_path / "base")
    assert_refused(done, "no adapter_config.json", "--base RUN")
    done = transduce("import", "some/name", tmp_path / "run", "--base", tmp_path / "base")  # nothing is downloaded
    assert_refused(done, "no adapter_config.json", "--base RUN")
    assert_refused(transduce("export", tmp_path / "base", tmp_path / "out", "--to", "peft"), "has no adapters")
