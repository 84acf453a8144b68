"""Files of vectors, the names of their sequences, and the reader that turns names into vectors."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from transduce.config.settings import TokenizerSettings
from transduce.data.lines import read_inputs, read_lines
from transduce.data.reading import read_labelled
from transduce.decoding.encoders import TextClassifier
from transduce.errors import DataError, RunFolderError
from transduce.text.tokenizer import Tokenizers
from transduce.text.training import train_tokenizer
from transduce.text.vectors import VectorFile, VectorReader
from vector_files import write_vectors

GOOD = {"vectors": np.ones((3, 2), np.float32), "lengths": np.array([1, 2])}


@pytest.fixture
def sequences() -> list[np.ndarray]:
    draw = np.random.default_rng(1)
    return [draw.normal(size=(n, 3)).astype(np.float32) for n in (1, 4, 2)]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_names_become_the_vectors_of_their_sequences(
    tmp_path: Path, sequences: list[np.ndarray], dtype: type[Any]
) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"vectors": np.concatenate(sequences).astype(dtype), "lengths": np.array([1, 4, 2])}, path)
    names = list(read_inputs(path))
    assert names == [f"{path}#{i}" for i in range(3)]
    reader = VectorReader.of(names)
    found = reader.encode_batch([names[2], names[0], names[1], names[0]])
    for i, one in zip((2, 0, 1, 0), found, strict=True):
        assert one.dtype == np.float32
        assert (one == sequences[i].astype(dtype)).all()


def test_the_reader_is_saved_with_the_run(tmp_path: Path) -> None:
    Tokenizers(VectorReader(7), VectorReader(7)).save(tmp_path)
    assert Tokenizers.load(tmp_path).n_src == 7
    (tmp_path / "tokenizer.src.json").write_text('{"kind": "vectors", "width": 0}')
    with pytest.raises(RunFolderError, match=r"tokenizer\.src"):
        Tokenizers.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"vectors": None}, "vectors"),
        ({"lengths": None}, "lengths"),
        ({"vectors": np.ones((3, 2))}, "F64"),
        ({"vectors": np.ones(6, np.float32)}, "expected F32 or F16"),
        ({"vectors": np.ones((3, 0), np.float32)}, "expected F32 or F16"),
        ({"lengths": np.array([1, 1])}, "3 in total"),
        ({"lengths": np.array([3, 0])}, "at least 1"),
        ({"lengths": np.array([5, -2])}, "at least 1"),
        ({"lengths": np.array([2**62, 2**62, 2**62, 2**62, 3])}, "3 in total"),
        ({"lengths": np.array([], np.int64)}, "at least 1"),
        ({"lengths": np.array([1.0, 2.0])}, "lengths is float64"),
        ({"lengths": np.array([[3]])}, "lengths is int64"),
    ],
)
def test_a_file_of_another_form_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], part: str) -> None:
    path = tmp_path / "bad.safetensors"
    save_file({name: array for name, array in (GOOD | changes).items() if array is not None}, path)
    with pytest.raises(DataError, match=r"bad\.safetensors") as error:
        VectorFile(path)
    assert part in str(error.value)


def test_missing_truncated_and_foreign_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(DataError, match=r"cannot read .*a\.safetensors"):
        VectorFile(path)
    save_file(GOOD, path)
    whole = path.read_bytes()
    for content in (b"", whole[:20], whole[:-1], b"text\n" * 9):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.safetensors: not a file of vectors"):
            VectorFile(path)


def test_names_of_nothing_are_refused(tmp_path: Path) -> None:
    path = write_vectors(tmp_path / "a.safetensors", [np.ones((2, 3)), np.full((1, 3), np.nan)])
    reader = VectorReader(3)
    for name in ("a dog", "", "a.txt#0", f"{path}#x", f"{path}#-1", f"{path}#{'9' * 5000}", str(path)):
        with pytest.raises(DataError, match="names no sequence"):
            reader.encode(name)
    with pytest.raises(DataError, match="has 2 sequences"):
        reader.encode(f"{path}#2")
    with pytest.raises(DataError, match="NaN or infinity"):
        reader.encode(f"{path}#1")
    with pytest.raises(DataError, match="vectors of 3 numbers; the model takes 4"):
        VectorReader(4).encode(f"{path}#0")


def test_a_file_of_vectors_is_no_text(tmp_path: Path) -> None:
    path = write_vectors(tmp_path / "a.safetensors", [np.ones((2, 3))], labels=np.array([1]))
    words = train_tokenizer(["a b c"] * 9, TokenizerSettings(kind="char"), vocab_size=40)
    for read in (read_lines, partial(read_inputs, vocabulary=words), partial(read_labelled, vocabulary=words)):
        with pytest.raises(DataError, match="is a file of vectors"):
            list(read(path))
    assert list(read_inputs(path, VectorReader(3))) == [f"{path}#0"]


def test_few_long_vectors_are_read_at_once() -> None:
    assert VectorReader(4).chunk == 10_000
    assert VectorReader(768).chunk == 85
    assert VectorReader(1 << 16).chunk == 1


def test_labels_are_read_from_the_file(tmp_path: Path) -> None:
    one = np.ones((1, 2))
    path = write_vectors(tmp_path / "a.safetensors", [one, one], labels=np.array([7, -1]))
    assert [(found.label, found.texts) for found in read_labelled(path)] == [
        ("7", (f"{path}#0",)),
        ("-1", (f"{path}#1",)),
    ]
    write_vectors(path, [one, one])
    with pytest.raises(DataError, match="has no labels"):
        list(read_labelled(path))
    write_vectors(path, [one, one], labels=np.array([1]))
    with pytest.raises(DataError, match="1 labels for 2 sequences"):
        list(read_labelled(path))


def test_damaged_files_are_refused_or_read(tmp_path: Path, sequences: list[np.ndarray]) -> None:
    path, draw = write_vectors(tmp_path / "a.safetensors", sequences, labels=np.array([1, 2, 3])), random.Random(1)
    whole = path.read_bytes()
    head, refused = 8 + int.from_bytes(whole[:8], "little"), 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(head)] = draw.randrange(256)
        path.write_bytes(damaged[: draw.choice([None, draw.randrange(len(damaged))])])
        try:
            file = VectorFile(path)
            assert len(file.labels) == len(VectorReader(3).encode_batch(list(file.names)))
        except DataError:
            refused += 1
    assert refused > 200


def test_vectors_too_large_for_a_model_are_named(tmp_path: Path) -> None:
    class Sum(torch.nn.Linear):
        def forward(self, vectors: torch.Tensor, *_: object) -> torch.Tensor:
            return vectors.sum(1) * torch.tensor([1e30, -1e30])

    path = tmp_path / "large.safetensors"
    save_file({"vectors": np.array([[1, 2], [1e38, -1e38]], np.float32), "lengths": np.array([1, 1])}, path)
    classifier = TextClassifier(Sum(2, 2), VectorReader(2), ["a", "b"], longest=4)
    assert classifier.classify([f"{path}#0"])[0].label == "a"
    with pytest.raises(DataError, match=r"large\.safetensors#1: the model's result is not a number"):
        classifier.classify([f"{path}#0", f"{path}#1"])
