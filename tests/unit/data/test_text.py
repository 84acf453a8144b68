"""Documents from plain text, held-out text, and the store of documents."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transduce.config.settings import TokenizerSettings
from transduce.data.encoding import encode_text
from transduce.data.preparation import choose_held_out, located, part_of
from transduce.data.reading import DOCUMENTS, Piece, read_pieces
from transduce.data.store import TextStore
from transduce.errors import DataError
from transduce.text.tokenizer import BOS, EOS, Tokenizer
from transduce.text.training import train_tokenizer

TEXT = "\n\none\ntwo\n \n\nthree\n\n"


def documents(pieces: list[Piece]) -> list[str]:
    found, text = [], ""
    for piece in pieces:
        text += piece.text
        if piece.ends:
            found.append(text)
            text = ""
    assert not text, "the last document has no end"
    return found


def measure(pieces: list[Piece]) -> list[int]:
    assert [piece for piece, _, _ in located(pieces)] == pieces
    return [end for piece, _, end in located(pieces) if piece.ends]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    settings = TokenizerSettings(kind="bpe", exact=True)
    return train_tokenizer(["one two three", "four five six"] * 5, settings, vocab_size=290)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("file", ["\n\none\ntwo\n \n\nthree\n\n"]),
        ("blank_line", ["one\ntwo", "three"]),
        ("line", ["one", "two", "three"]),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_document_boundaries(tmp_path: Path, kind: str, expected: list[str], packed: bool) -> None:
    path = tmp_path / ("a.txt.gz" if packed else "a.txt")
    path.write_bytes(gzip.compress(TEXT.encode()) if packed else TEXT.encode())
    assert documents(list(read_pieces(path, kind))) == expected


@given(text=st.text(alphabet="ab \n", max_size=30), kind=st.sampled_from(list(DOCUMENTS)))
def test_documents_contain_all_text_that_is_not_blank(text: str, kind: str) -> None:
    lines = text.split("\n")
    found = documents(list(DOCUMENTS[kind](iter(lines))))
    assert all(found) and (kind == "file" or all(document.strip() for document in found))
    assert "".join(found).replace("\n", "").replace(" ", "") == text.replace("\n", "").replace(" ", "")
    if kind == "file":
        assert found == ["".join(f"{line}\n" for line in lines)]


@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=6),
    share=st.floats(0.01, 0.9),
    whole=st.booleans(),
)
def test_held_out_and_remaining_text_add_up_to_the_whole(sizes: list[list[int]], share: float, whole: bool) -> None:
    pieces = [
        Piece(chr(97 + (i + j) % 26) * n, ends=j == len(document) - 1)
        for i, document in enumerate(sizes)
        for j, n in enumerate(document)
    ]
    held = choose_held_out(measure(pieces), share=share, most=1000, seed=1, whole=whole)
    kept, out = (list(part_of(pieces, held, held_out=held_out)) for held_out in (False, True))
    assert sum(measure(kept) + measure(out)) == sum(measure(pieces))
    assert sorted("".join(documents(kept) + documents(out))) == sorted("".join(documents(pieces)))
    if whole:
        assert sorted(documents(kept) + documents(out)) == sorted(documents(pieces))
        assert documents(kept), "something is left to train on"
    else:
        originals = documents(pieces)
        assert all(any(whole_one.startswith(part) for whole_one in originals) for part in documents(kept))
        assert all(any(whole_one.endswith(part) for whole_one in originals) for part in documents(out))


def test_documents_are_stored_with_bos_and_eos_and_read_back(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one two\nthree\n\nfour ж\n", encoding="utf-8")
    store = encode_text(tmp_path / "store", read_pieces(path, "blank_line"), tokenizer)
    one, two = tokenizer.encode("one two\nthree"), tokenizer.encode("four ж")
    expected = [BOS, *one, EOS, BOS, *two, EOS]
    assert store.ids.tolist() == expected and store.ids.dtype == np.uint16
    assert (store.facts["documents"], store.n_bytes, store.n_tokens) == (2, 13 + 7, len(one) + len(two) + 2)
    again = TextStore.open(tmp_path / "store")
    assert again.ids.tolist() == expected
    memory = encode_text(None, read_pieces(path, "blank_line"), tokenizer)
    assert memory.ids.tolist() == expected and memory.n_bytes == 20


def test_empty_text_is_refused_and_leaves_no_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="training text: no text"):
        encode_text(tmp_path / "store", iter(()), tokenizer)
    assert not list(tmp_path.iterdir())
