"""Stores of documents and of labelled texts: what is written is read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from transduce.config.settings import TokenizerSettings
from transduce.data.encoding import encode_labelled, encode_sentences, pack_texts
from transduce.data.reading import Labelled, read_pieces
from transduce.data.store import LabelStore, SentenceStore
from transduce.errors import DataError, RunFolderError
from transduce.text.special import BOS, EOS
from transduce.text.tokenizer import Tokenizer
from transduce.text.training import train_tokenizer

LINES = ["a dog runs fast", "the dog sleeps", "a cat", "cats and dogs run"] * 5


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(LINES, TokenizerSettings(mask=True), vocab_size=40)


@pytest.mark.parametrize(("documents", "n"), [("file", 1), ("blank_line", 3), ("line", 5)])
def test_documents_are_stored_as_sentences(tmp_path: Path, tokenizer: Tokenizer, documents: str, n: int) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\n\n a dog\nthe dog sleeps\n\n\ncats and dogs\n \t\nrun\na cat\n")
    store = encode_sentences(tmp_path / "s", read_pieces(path, documents), tokenizer, longest=50)
    again = SentenceStore.open(tmp_path / "s")
    found = [tokenizer.decode(again.span(i, i + 1).tolist()) for i in range(len(again.offsets) - 1)]
    assert found == ["a dog", "the dog sleeps", "cats and dogs", "run", "a cat"]
    assert store.n_documents == n and again.documents[-1] == 5
    assert tokenizer.decode(again.span(0, 5).tolist()) == " ".join(found)
    (tmp_path / "s" / "ids.npy").write_bytes(b"x" * 200)
    with pytest.raises(RunFolderError, match=r"ids\.npy is damaged"):
        SentenceStore.open(tmp_path / "s")


def test_long_lines_are_split_into_equal_parts_without_loss(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(LINES) + "\nrun\n")
    store = encode_sentences(tmp_path / "s", read_pieces(path, "file"), tokenizer, longest=12)
    assert store.lengths.max() <= 12 and store.lengths[:-1].min() >= 11
    assert store.ids.tolist() == tokenizer.encode(" ".join(LINES)) + tokenizer.encode("run")
    path.write_text("\n \n")
    with pytest.raises(DataError, match="validation text: no text"):
        encode_sentences(tmp_path / "s", read_pieces(path, "file"), tokenizer, longest=9, name="validation text")


def test_labelled_texts_are_stored_and_read_back(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def example(label: str, *texts: str) -> Labelled:
        return Labelled(label, texts, "f.tsv", 1)

    examples = [example("b", "a dog", "runs"), example("a", "a cat", "the dog sleeps fast " * 9)]
    store = encode_labelled(tmp_path / "s", examples, ("a", "b"), tokenizer, longest=20)
    again = LabelStore.open(tmp_path / "s")
    assert again.labels.tolist() == [1, 0]
    assert store.facts["longest"] == 1
    first, second = again[0], again[1]
    assert first.ids.tolist() == [BOS, *tokenizer.encode("a dog"), EOS, *tokenizer.encode("runs"), EOS]
    assert first.segments.sum() == len(tokenizer.encode("runs")) + 1
    assert len(second.ids) <= 20 and second.ids[-1] == EOS
    assert second.ids[1 : 1 + len(tokenizer.encode("a cat"))].tolist() == tokenizer.encode("a cat")  # the longer is cut
    with pytest.raises(RunFolderError, match=r"documents\.npy is missing"):
        SentenceStore.open(tmp_path / "s")
    with pytest.raises(DataError, match="unknown label 'c'"):
        encode_labelled(tmp_path / "s", [example("c", "x", "y")], ("a", "b"), tokenizer, longest=20)


def test_texts_are_truncated_to_the_maximum_length(tokenizer: Tokenizer) -> None:
    for texts in (("a dog " * 50,), ("a dog " * 50, "the cat " * 50), ("", ""), ("a", "dog " * 40)):
        (packed,) = pack_texts([texts], tokenizer, longest=16)
        assert len(packed.ids) <= 16 and packed.ids[0] == BOS and packed.ids.tolist().count(EOS) == len(texts)
