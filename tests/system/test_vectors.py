"""Vectors in place of source text, through the commands: training, resume, translation, evaluation, labels, reports."""

import json
from multiprocessing.context import ForkServerContext
from pathlib import Path

import numpy as np
import pytest

from shared import build_once
from system.commands import sets, small, succeed, transduce
from system.teams import assert_resumes_exactly
from transduce import compare
from transduce.config.recipe import read_recipe
from vector_files import WIDTH, write_task, write_vectors

MODEL = ("model.source=vectors", "model.dropout=0", "model.positions=rotary", "training.valid_updates=40")


@pytest.fixture(scope="module")
def data(shared: Path) -> Path:
    def write(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        for name, n, seed in (("train", 1500, 1), ("valid", 100, 3), ("test", 20, 2)):
            write_task(folder, name, n, seed=seed)

    return build_once(shared / "vectors", write)


def pairs(data: Path, *more: str) -> list[str]:
    named = []
    for prefix, name in (("--", "train"), ("--valid-", "valid"), ("--test-", "test")):
        named += [f"{prefix}src", str(data / f"{name}.safetensors"), f"{prefix}tgt", str(data / f"{name}.txt")]
    return ["train", *named, *small(*MODEL, *more)]


@pytest.fixture(scope="module")
def run(data: Path) -> Path:
    """A finished run that has learned the symbols."""
    rates = ("training.lr=0.003", "training.matrix_lr=0.01")
    more = ("model.positions=sinusoidal", "training.max_updates=320", "evaluation.tokenize=none")

    def train(path: Path) -> None:
        succeed(*pairs(data, *rates, *more), "--run", path)

    return build_once(data / "run", train)


def test_a_sequence_of_vectors_is_translated(data: Path, run: Path) -> None:
    done = transduce("translate", run, data / "test.safetensors")
    expected = (data / "test.txt").read_text().splitlines()
    right = sum(one == other for one, other in zip(done.out.splitlines(), expected, strict=True))
    assert right >= 18, done.out  # found: all 20, in 16 trainings
    one = transduce("translate", run, data / "test.safetensors", "--json", "--batch-tokens", "1")
    assert [json.loads(line)["text"] for line in one.out.splitlines()] == done.out.splitlines()


def test_scores_attention_and_report_of_vectors(data: Path, run: Path) -> None:
    done = transduce("evaluate", run, "--src", data / "test.safetensors", "--ref", data / "test.txt")
    assert done.code == 0 and "BLEU" in done.out
    succeed("inspect", run, f"{data / 'test.safetensors'}#3", "--html", data / "map.html")
    assert "test.safetensors" in (run / "report.html").read_text()
    assert "THIS_FOLDER in.safetensors" in (run / "README.md").read_text()
    assert transduce("score", run, "--src", data / "test.safetensors", "--tgt", data / "test.txt").code == 0


@pytest.mark.slow
def test_a_killed_training_on_vectors_resumes_bit_by_bit(
    data: Path, tmp_path: Path, processes: ForkServerContext
) -> None:
    command = pairs(data, "training.max_updates=16", "training.save_updates=4")
    assert_resumes_exactly(processes, tmp_path, command, ("update", 7), ("checkpoint", 2))


def test_a_classifier_of_vectors(data: Path, tmp_path: Path) -> None:
    run, test = tmp_path / "run", data / "test.safetensors"
    files = [
        f'data.{name}=[{{path="{data / file}"}}]' for name, file in (("train", "train.safetensors"), ("test", test))
    ]
    values = (*MODEL, *files, "task=classification", "model.preset=bert-tiny", "model.d_model=32", "model.d_ff=64")
    limits = ("training.max_updates=60", "training.batch_tokens=512", "training.precision=float32")
    arguments = sets(*values, *limits)
    done = succeed("train", "--run", run, *arguments)
    assert "vectors have no [CLS]" in done.err + done.out
    done = transduce("train", "--run", tmp_path / "x", *arguments, "--set", "tokenizer.kind=char")
    assert done.code == 2 and "tokenizer.kind has no effect" in done.err
    found = compare({"one": read_recipe(run / "recipe.toml")}, tmp_path / "compared", updates=3)
    assert found.measure == "accuracy" and found.systems[0].updates == 3
    done = transduce("classify", run, test)
    assert len(done.out.splitlines()) == 20
    done = transduce("evaluate", run, "--labels", test, "--json")
    assert json.loads(done.out)["accuracy"] >= 0.7, done.out


def test_what_needs_text_refuses_vectors(data: Path, run: Path, tmp_path: Path) -> None:
    vectors, texts, test = (data / name for name in ("train.safetensors", "train.txt", "test.safetensors"))
    text_run = tmp_path / "text"
    succeed("train", "--src", texts, "--tgt", texts, "--run", text_run, *small("tokenizer.joint=false"))
    new = ("--run", tmp_path / "x")
    train = ("--src", vectors, "--tgt", texts, "--set", "model.source=vectors")
    cases: dict[str, list[object]] = {
        "set model.source = 'vectors'": ["train", *train[:4], *new],
        "only a source": ["train", "--src", texts, "--tgt", vectors, *new],
        "the doctor needs": ["doctor", *train],
        "export needs": ["export", run, tmp_path / "x", "--to", "huggingface"],
        "distillation needs": ["distill", run, *new],
        "cannot be extended": ["train", *train, *new, "--from", run, "--extend-vocabulary", "5"],
        "tokenizer.joint": [*pairs(data, "tokenizer.joint=true"), *new],
        "tokenizer.sampling": [*pairs(data, "tokenizer.sampling=0.1"), *new],
        "needs files of vectors": ["train", "--src", texts, "--tgt", texts, *new, *small(*MODEL)],
        "source of that run is text": [*pairs(data, f"tokenizer.start={text_run}", "tokenizer.vocab_size=21"), *new],
        "text file belongs here": ["translate", text_run, test],
        "a text file belongs here": ["score", text_run, "--src", test, "--tgt", data / "test.txt"],
        "text file belongs": ["evaluate", run, "--src", test, "--ref", data / "test.txt", "--against", text_run],
        "file of vectors": ["translate", run, test, "--output-dir", tmp_path / "out"],
        "names no sequence": ["translate", run, texts],
    }
    for part, arguments in cases.items():
        done = transduce(*arguments)
        assert (done.code, part in done.err) == (2, True), (part, done.err)
        assert len(done.err.strip().splitlines()[-1]) < 300


def test_vectors_of_another_width_are_refused(run: Path, tmp_path: Path) -> None:
    other = write_vectors(tmp_path / "other.safetensors", [np.ones((2, WIDTH + 1))])
    done = transduce("translate", run, other)
    assert done.code == 2 and f"vectors of {WIDTH + 1} numbers; the model takes {WIDTH}" in done.err
