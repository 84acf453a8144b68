"""Vectors in place of source text, through the commands: training, resume, translation, evaluation, labels, reports."""

from __future__ import annotations

import json
import signal
from multiprocessing.context import ForkServerContext
from pathlib import Path

import numpy as np
import pytest
import torch

import toys
from system.commands import sets, small, transduce
from transduce import Budget, compare
from transduce.config.recipe import read_recipe
from transduce.runs.folder import RunFolder
from vector_files import WIDTH, write_task, write_vectors

MODEL = ("model.source=vectors", "model.dropout=0", "model.positions=rotary", "training.valid_updates=40")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    write_task(folder, "train", 1500, seed=1)
    write_task(folder, "valid", 100, seed=3)
    write_task(folder, "test", 20, seed=2)
    return folder


def pairs(data: Path, run: Path, *more: str) -> list[str]:
    named = []
    for prefix, name in (("--", "train"), ("--valid-", "valid"), ("--test-", "test")):
        named += [f"{prefix}src", str(data / f"{name}.safetensors"), f"{prefix}tgt", str(data / f"{name}.txt")]
    return ["train", *named, "--run", str(run), *small(*MODEL, *more)]


@pytest.fixture(scope="module")
def run(data: Path) -> Path:
    """A finished run that has learned the symbols."""
    path = data / "run"
    rates = ("training.lr=0.003", "training.matrix_lr=0.01")
    more = ("model.positions=sinusoidal", "training.max_updates=320", "evaluation.tokenize=none")
    done = transduce(*pairs(data, path, *rates, *more))
    assert done.code == 0, done.err
    return path


def test_a_sequence_of_vectors_is_translated(data: Path, run: Path) -> None:
    done = transduce("translate", run, data / "test.safetensors")
    expected = (data / "test.txt").read_text().splitlines()
    right = sum(one == other for one, other in zip(done.out.splitlines(), expected, strict=True))
    assert right >= 18, done.out  # found: all 20, in 16 trainings
    one = transduce("translate", run, data / "test.safetensors", "--json", "--batch-tokens", "1")
    assert [json.loads(line)["text"] for line in one.out.splitlines()] == done.out.splitlines()


def test_a_comparison_gives_models_of_vectors_a_size(run: Path, tmp_path: Path) -> None:
    budget = Budget(updates=2, params=30_000)
    (found,) = compare({"one": read_recipe(run / "recipe.toml")}, tmp_path / "compared", budget=budget).systems
    assert abs(found.n_parameters - 30_000) <= 3_000


def test_scores_attention_and_report_of_vectors(data: Path, run: Path) -> None:
    done = transduce("evaluate", run, "--src", data / "test.safetensors", "--ref", data / "test.txt")
    assert done.code == 0 and "BLEU" in done.out
    done = transduce("inspect", run, f"{data / 'test.safetensors'}#3", "--html", data / "map.html")
    assert done.code == 0, done.err
    assert "test.safetensors" in (run / "report.html").read_text()
    assert "THIS_FOLDER in.safetensors" in (run / "README.md").read_text()
    assert transduce("score", run, "--src", data / "test.safetensors", "--tgt", data / "test.txt").code == 0


def test_a_killed_training_on_vectors_resumes_bit_by_bit(
    data: Path, tmp_path: Path, processes: ForkServerContext
) -> None:
    more = ("training.max_updates=16", "training.save_updates=4")
    assert transduce(*pairs(data, tmp_path / "whole", *more)).code == 0
    for kill in (("update", 7), ("checkpoint", 2)):
        arguments = (pairs(data, tmp_path / "cut", *more), tmp_path / "errors", *kill)
        process = processes.Process(target=toys.killed_command, args=arguments)
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL, (tmp_path / "errors").read_text()
    assert transduce(*pairs(data, tmp_path / "cut", *more)).code == 0
    one, other = (RunFolder.open(tmp_path / name).load_model() for name in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_classifier_of_vectors(data: Path, tmp_path: Path) -> None:
    run, test = tmp_path / "run", data / "test.safetensors"
    files = [
        f'data.{name}=[{{path="{data / file}"}}]' for name, file in (("train", "train.safetensors"), ("test", test))
    ]
    values = (*MODEL, *files, "task=classification", "model.preset=bert-tiny", "model.d_model=32", "model.d_ff=64")
    limits = ("training.max_updates=60", "training.batch_tokens=512", "training.precision=float32")
    arguments = sets(*values, *limits)
    done = transduce("train", "--run", run, *arguments)
    assert done.code == 0, done.err
    assert "vectors have no [CLS]" in done.err + done.out
    done = transduce("train", "--run", tmp_path / "x", *arguments, "--set", "tokenizer.kind=char")
    assert done.code == 2 and "tokenizer.kind has no effect" in done.err
    found = compare(
        {"one": read_recipe(run / "recipe.toml")}, tmp_path / "compared", budget=Budget(updates=3, params=60_000)
    )
    assert found.measure == "accuracy" and found.systems[0].updates == 3
    done = transduce("classify", run, test)
    assert len(done.out.splitlines()) == 20
    done = transduce("evaluate", run, "--labels", test, "--json")
    assert json.loads(done.out)["accuracy"] >= 0.7, done.out


def test_what_needs_text_refuses_vectors(data: Path, run: Path, tmp_path: Path) -> None:
    text_run, texts = tmp_path / "text", data / "train.txt"
    assert (
        transduce("train", "--src", texts, "--tgt", texts, "--run", text_run, *small("tokenizer.joint=false")).code == 0
    )
    train = ["--src", data / "train.safetensors", "--tgt", data / "train.txt"]
    cases = {
        "set model.source = 'vectors'": ["train", *train, "--run", tmp_path / "x"],
        "only a source": [
            "train",
            "--src",
            data / "train.txt",
            "--tgt",
            data / "train.safetensors",
            "--run",
            tmp_path / "x",
        ],
        "the doctor checks text": ["doctor", *train, "--set", "model.source=vectors"],
        "no format can express": ["export", run, tmp_path / "x", "--to", "onnx"],
        "a shortlist needs": ["shortlist", run],
        "distillation needs": ["distill", run, "--run", tmp_path / "x"],
        "have no vocabulary": [
            *("train", *train, "--run", tmp_path / "x", "--from", run),
            *("--extend-vocabulary", "5", "--set", "model.source=vectors"),
        ],
        "tokenizer.joint": [*pairs(data, tmp_path / "x", "tokenizer.joint=true")],
        "tokenizer.sampling": [*pairs(data, tmp_path / "x", "tokenizer.sampling=0.1")],
        "needs files of vectors": ["train", "--src", texts, "--tgt", texts, "--run", tmp_path / "x", *small(*MODEL)],
        "source of that run is text": [
            *pairs(data, tmp_path / "x", f"tokenizer.start={text_run}", "tokenizer.vocab_size=13")
        ],
        "text file belongs here": ["translate", text_run, data / "test.safetensors"],
        "this model reads text": ["score", text_run, "--src", data / "test.safetensors", "--tgt", data / "test.txt"],
        "reads text and the other vectors": [
            *("evaluate", run, "--src", data / "test.safetensors", "--ref", data / "test.txt"),
            *("--against", text_run),
        ],
        "is for text": ["translate", run, data / "test.safetensors", "--output-dir", tmp_path / "out"],
        "names no sequence": ["translate", run, data / "train.txt"],
    }
    for part, arguments in cases.items():
        done = transduce(*arguments)
        assert (done.code, part in done.err) == (2, True), (part, done.err)
        assert len(done.err.strip().splitlines()[-1]) < 300


def test_vectors_of_another_width_are_refused(run: Path, tmp_path: Path) -> None:
    other = write_vectors(tmp_path / "other.safetensors", [np.ones((2, WIDTH + 1))])
    done = transduce("translate", run, other)
    assert done.code == 2 and f"vectors of {WIDTH + 1} numbers; the model takes {WIDTH}" in done.err
