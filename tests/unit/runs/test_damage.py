"""Damage found by fuzzing (`benchmarks/fuzz.py`): a one-line error names the file even if the checksums match."""

# ruff: noqa: E501  (tables of strange values)
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import marians
import toys
from system.commands import transduce
from transduce.config.settings import Settings
from transduce.convert.hub_folder import read_tokenizer
from transduce.data.pairs import Memory
from transduce.data.store import TextStore
from transduce.decoding.translator import Translator
from transduce.errors import DataError, RunFolderError
from transduce.evaluation.report import report_html
from transduce.evaluation.run_record import read_record, render_record, save_set
from transduce.metrics_log import MetricsFile
from transduce.runs.atomic import MOST_JSON, expecting, read_bytes, read_json
from transduce.runs.folder import RunFolder
from transduce.runs.manifest import fingerprint
from transduce.runs.tensors import load_tensors, write_tensors
from transduce.text.hub import HubTokenizer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return marians.make_run(tmp_path / "run")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "victim").write_text("untouched")
    return folder


def enter(run: Path, name: str) -> None:
    """Update a file's checksum in the manifest."""
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["files"][name] = fingerprint(run / name)
    (run / "manifest.json").write_text(json.dumps(manifest))


# -- JSON and folders


def test_pipes_and_devices_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(RunFolderError, match=r"a.json is no regular file"):
        read_json(tmp_path / "a.json")
    (tmp_path / "b.json").symlink_to("/dev/zero")
    with pytest.raises(RunFolderError, match=r"b.json is no regular file"):
        read_bytes(tmp_path / "b.json", most=10)
    with (tmp_path / "c.json").open("wb") as file:
        file.truncate(MOST_JSON + 1)  # sparse: takes no disk space
    with pytest.raises(RunFolderError, match=r"no such file has 268,435,457 bytes"):
        read_json(tmp_path / "c.json")


def test_a_value_of_an_unexpected_form_is_damaged(tmp_path: Path) -> None:
    for wrong in (lambda: {}["a"], lambda: int("x"), lambda: 1 + None, lambda: [][3], lambda: None.x):  # type: ignore[operator,attr-defined]
        with pytest.raises(RunFolderError, match=r"x.json is damaged"), expecting("x.json"):
            wrong()


@pytest.mark.parametrize("link", ["victim", "new"])
@pytest.mark.parametrize(
    "place",
    [
        "metrics.jsonl",
        ".lock",
        "tokenizer.model",
        "checkpoints",
        "checkpoints/u00000001",
        "averaging/u",
        "preparation/x",
    ],
)
def test_training_does_not_write_through_a_link_out_of_the_run_folder(
    run: Path, outside: Path, place: str, link: str
) -> None:
    (run / place).unlink(missing_ok=True)
    (run / place).parent.mkdir(exist_ok=True)
    (run / place).symlink_to(outside / link)
    settings = Settings.from_mapping({"name": "toy", "model": marians.MODEL})
    with pytest.raises(RunFolderError, match=f"{place} is a link that leads out of the run folder"):
        RunFolder.create(run, settings, "")
    assert [path.name for path in outside.iterdir()] == ["victim"] and (outside / "victim").read_text() == "untouched"


def test_a_run_folder_with_links_can_be_used_and_links_of_a_tracker_do_not_stop_training(
    run: Path, outside: Path, tmp_path: Path
) -> None:
    logs = run / "wandb" / "run-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to(outside / "victim")  # as wandb does
    (run / "model.safetensors").rename(run / "weights")
    (run / "model.safetensors").symlink_to("weights")
    (tmp_path / "other").symlink_to(run)
    RunFolder.create(tmp_path / "other", RunFolder.open(run).settings, "").close()
    (run / "weights").rename(outside / "weights")
    (run / "model.safetensors").unlink()
    (run / "model.safetensors").symlink_to(outside / "weights")  # as in the cache of Hugging Face
    assert Translator.load(tmp_path / "other").translate(["a man"])


@pytest.mark.parametrize("name", ["metrics.jsonl", "model.safetensors", "tokenizer.model"])
def test_a_pipe_in_a_run_folder_is_not_waited_for(run: Path, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    with pytest.raises(RunFolderError, match=f"{name} is no regular file"):
        MetricsFile(RunFolder.open(run).path / "metrics.jsonl").read()


@pytest.mark.parametrize("name", ["../outside/victim", "/etc/passwd", "a\0b", "..", "", "a\\b"])
def test_a_manifest_names_files_of_its_folder_only(run: Path, outside: Path, name: str) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["files"][name] = fingerprint(outside / "victim")
    (run / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunFolderError, match=r"manifest.json is damaged"):
        RunFolder.open(run)


# -- models


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("n_decoder_layers", 200, "does not fit the settings"),
        ("d_model", 65536, "does not fit the settings"),
        ("max_positions", 5000, None),  # sinusoids are computed, not stored
        ("max_positions", 1 << 24, "less than or equal to 1000000"),
        ("d_ff", 1 << 20, "does not fit the settings"),
        ("n_decoder_layers", 1 << 30, "less than or equal to 1024"),
        ("residual", "/pre", "config.json describes no model: model.residual"),
    ],
)
def test_sizes_that_contradict_the_weights_allocate_no_memory(
    run: Path, key: str, value: object, message: str | None
) -> None:
    config = json.loads((run / "config.json").read_text())
    config["model"][key] = value
    (run / "config.json").write_text(json.dumps(config))
    enter(run, "config.json")
    if message is None:
        assert Translator.load(run).translate(["a man"])
        return
    with pytest.raises(RunFolderError, match=message):
        Translator.load(run)


# -- checkpoints


def change_state(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state = json.loads((path / "state.json").read_text())
    change(state)
    (path / "state.json").write_text(json.dumps(state))
    enter(path, "state.json")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy") / "run"
    toys.toy_run(path, toys.settings(max_updates=2, valid_updates=1))
    return path


def unfinished(state: dict[str, Any]) -> None:
    state["training"]["finished"] = ""


@pytest.fixture
def last(trained: Path, tmp_path: Path) -> Path:
    """The last checkpoint of a copy of the run."""
    shutil.copytree(trained, tmp_path / "run")
    return max((tmp_path / "run" / "checkpoints").iterdir())


def resume(checkpoint: Path) -> None:
    toys.toy_run(checkpoint.parent.parent, toys.settings(max_updates=2, valid_updates=1))


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.pop("training"),
        lambda s: s.update(training=[]),
        lambda s: s["training"].update(rows=3.5),
        lambda s: s["training"].update(rows=[[1, 2]]),
        lambda s: s["training"].update(rows=[["x"] * 8]),
        lambda s: s["training"].update(best_scores=[1]),
        lambda s: s["training"].update(update=-1),
        lambda s: s["training"].update(update=1 << 62),
        lambda s: s["training"].update(epochs="x"),
        lambda s: s["training"].update(seconds=-1.0),
        lambda s: s["training"]["position"].update(epoch=0.5),
        lambda s: s["training"].update(scores={"loss": "x"}),
        lambda s: s["average"].update(count=None),
    ],
)
def test_a_malformed_state_is_damaged(last: Path, change: Callable[[dict[str, Any]], object]) -> None:
    change_state(last, lambda state: (unfinished(state), change(state)))
    with pytest.raises(RunFolderError, match=f"{last.name} is damaged"):
        resume(last)


@pytest.mark.parametrize("fate", ["shape", "type", "missing", "optimizer"])
def test_tensors_of_another_model_are_damaged(last: Path, fate: str) -> None:
    tensors = load_tensors(last / "training.safetensors")
    name = next(n for n in tensors if n.startswith("model/"))
    if fate == "shape":
        tensors[name] = tensors[name][:1].clone()
    elif fate == "type":
        tensors[name] = tensors[name].to(torch.int32)
    elif fate == "missing":
        tensors.pop(name)
    else:
        name = next(n for n in tensors if n.endswith("exp_avg") and tensors[n].dim() == 2)
        tensors[name] = tensors[name][:1].clone()
    write_tensors(last / "training.safetensors", tensors)
    enter(last, "training.safetensors")
    change_state(last, unfinished)
    with pytest.raises(RunFolderError, match=f"{last.name} is damaged"):
        resume(last)


# -- encoded text


@pytest.mark.parametrize(
    "content",
    [
        b"", b"PK\x03\x04 and more", b"\x93NUMPY\x09\x00", b"\x93NUMPY\x01\x00\xff\xff{",
        b"\x93NUMPY\x01\x00\x10\x00" + b"(" * 15 + b"\n", b"\x93NUMPY\x01\x00\x40\x00" + b"{'descr': '<i4', 'fortran_order': False, 'shape': (1L\n".ljust(64),
        pickle.dumps([1]),
    ],
)  # fmt: skip
def test_invalid_array_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "store.json").write_text(json.dumps({"format": 1}))
    (tmp_path / "ids.npy").write_bytes(content)
    with pytest.raises(RunFolderError, match=r"ids.npy is damaged"):
        TextStore.open(tmp_path)


# -- records


RECORDS = (
    *("scores.json", "text_scores.json", "label_scores.json", "masked_scores.json"),
    *("samples.json", "attention.json", "data.json"),
)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("value", [[1], {"sets": [{"x": 1}]}, {"sets": [[]], "sentences": [{"src": 1}], "leaks": 3}])
def test_the_run_of_a_malformed_record_is_named(run: Path, name: str, value: object) -> None:
    folder = RunFolder.open(run)
    before = render_record(folder, report_html)
    (run / name).write_text(json.dumps(value))
    try:
        read_record(folder)
        assert render_record(folder, report_html) and before
    except RunFolderError as error:  # if it is not left out
        assert "is damaged" in str(error) and f"transduce verify {run}" in str(error)


def test_a_record_with_invalid_numbers_is_named_when_it_is_extended(run: Path) -> None:
    folder = RunFolder.open(run)
    for content in ('{"sets": [], "x": NaN}', '{"sets": [], "x": 1e999}', '{"sets": 3}', "[]"):
        (run / "text_scores.json").write_text(content)
        with pytest.raises(RunFolderError, match=r"text_scores.json is damaged"):
            save_set(folder, "text_scores", "a", {"nll": 1.0})
        assert (run / "text_scores.json").read_text() == content


# -- vocabularies, imports, recipes, text


def test_ids_of_another_vocabulary(tmp_path: Path) -> None:
    for theirs in ([1, 2, 3, 4, -2], [1, 2, 3, 4, 1 << 40], [1, 2, 3, 4, True], [1, 2]):
        with pytest.raises(ValueError, match=r"ids of a vocabulary|not a tokenizer"):
            HubTokenizer(b"{}", theirs)


@pytest.mark.parametrize("value", [1 << 31, (1 << 32) - 1, 1 << 70, -1, 1.5, "1", True, None])
def test_ids_that_would_crash_the_process(tmp_path: Path, value: object) -> None:
    """The tokenizers library allocates memory for every id up to the largest, and aborts if there is too little."""
    made = {"model": {"type": "BPE", "vocab": {"a": 0, "b": value}, "merges": []}, "added_tokens": []}
    added = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": [{"id": value, "content": "b"}]}
    for content in (made, added):
        with pytest.raises(ValueError, match=r"one id per piece"):
            HubTokenizer(json.dumps(content).encode(), [0, 0, 0, 0])
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": value}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(RunFolderError, match=r"the vocabulary in .* is damaged"):
        read_tokenizer(tmp_path, [])


def test_a_long_error_message_is_shortened(tmp_path: Path) -> None:
    done = transduce("translate", tmp_path / ("x" * 200) / ("y" * 200), *["z" * 250] * 30)
    assert done.code == 2 and len(done.err) < 2100
    done = transduce(
        "train", "--set", f"data.separate_documents={[0] * 5000}", "--src", tmp_path / "a", "--tgt", tmp_path / "b"
    )
    assert done.code == 2 and len(done.err) < 2100 and "[...]" in done.err


def test_a_path_that_links_to_itself(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "a")
    corpus = {"data": {"train": [{"path": str(tmp_path / "a")}]}}
    assert Settings.from_mapping(corpus).resolve_paths(tmp_path).data.train[0].path == tmp_path / "a"


@pytest.mark.parametrize("encoding", ["x", "hex", "utf-32"])
def test_a_translation_memory_in_an_unknown_encoding(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.tmx").write_text(f'<?xml version="1.0" encoding="{encoding}"?><tmx><body/></tmx>')
    with pytest.raises(DataError, match=r"a.tmx, line 1: not valid TMX"):
        list(Memory(tmp_path / "a.tmx", 1 << 20).units())
