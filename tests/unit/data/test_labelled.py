"""Labelled texts, pairs of sentences and documents: files, their errors, and stores."""

import gzip
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transduce.config.settings import TokenizerSettings
from transduce.data.batching import FOLLOWS, RANDOM, PairPlan, fit, plan_pairs
from transduce.data.encoding import encode_labelled, encode_sentences
from transduce.data.reading import Labelled, number_of, read_labelled, read_pieces, sorted_labels
from transduce.data.store import LabelStore, SentenceStore, pack, pack_texts
from transduce.errors import DataError, RunFolderError
from transduce.text.special import BOS, EOS
from transduce.text.tokenizer import Tokenizer
from transduce.text.training import train_tokenizer


def test_one_text_or_two(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("pos\tA good film.\nneg\t Bad , it was\r\n", encoding="utf-8")
    assert list(read_labelled(path)) == [
        Labelled("pos", ("A good film.",), str(path), 1),
        Labelled("neg", (" Bad , it was",), str(path), 2),
    ]
    packed = tmp_path / "b.tsv.gz"
    packed.write_bytes(gzip.compress("1\tA\tB é\n".encode()))
    assert list(read_labelled(packed)) == [Labelled("1", ("A", "B é"), str(packed), 1)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1\ta\nno tab\n", "line 2: expected label<TAB>text or label<TAB>text<TAB>text, found no tab"),
        ("1\ta\tb\tc\n", "line 1: expected .*, found 3 tabs"),
        ("\ta\n", "line 1: the label is empty"),
        ("1\ta\n1\t \n", "line 2: the text is empty"),
        ("1\ta\n1\ta\tb\n", "line 2: 2 texts, but the lines before have 1"),
        ("1\ta\n\n", "line 2: .*no tab"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(text)
    with pytest.raises(DataError, match=f"a.tsv, {said}"):
        list(read_labelled(path))


def test_labels_are_sorted_and_unknown_labels_refused() -> None:
    def some(*labels: str) -> list[Labelled]:
        return [Labelled(label, ("x",), "f.tsv", i) for i, label in enumerate(labels, 1)]

    assert sorted_labels(["10", "9", "9", "-1"]) == ("-1", "9", "10")
    assert sorted_labels(["b", "a", "10"]) == ("10", "a", "b")
    assert sorted_labels(["--5", "10", "9"]) == ("--5", "10", "9")
    assert number_of(some("b")[0], ("a", "b")) == 1
    with pytest.raises(DataError, match=r"f.tsv, line 2: unknown label 'positiv'.*positive.*known: negative, pos"):
        number_of(some("x", "positiv")[1], ("negative", "positive"))


DOCUMENTS = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), min_size=2, max_size=8)


def planned(documents: list[list[int]], *, room: int = 20, seed: int = 1, epoch: int = 0) -> list[PairPlan]:
    starts = np.cumsum([0, *map(len, documents)])
    return plan_pairs(np.array([n for d in documents for n in d]), starts, room=room, seed=seed, epoch=epoch)


@given(DOCUMENTS, st.integers(2, 64), st.integers(0, 9))
def test_invariants_of_pair_plans(documents: list[list[int]], room: int, epoch: int) -> None:
    plans = planned(documents, room=room, epoch=epoch)
    assert plans == planned(documents, room=room, epoch=epoch)
    owner = [number for number, d in enumerate(documents) for _ in d]
    assert [plan.number for plan in plans] == list(range(len(plans)))
    last = 0
    for plan in plans:
        (a, a_end), (b, b_end) = plan.a, plan.b
        assert a < a_end and b < b_end
        assert len({owner[i] for i in range(a, a_end)}) == 1 and len({owner[i] for i in range(b, b_end)}) == 1
        assert (owner[a] == owner[b]) == (plan.label == FOLLOWS)
        if plan.label == FOLLOWS:
            assert b == a_end
        assert a >= last  # no sentence begins two pairs
        last = a + 1
    covered = {i for p in plans for i in (*range(*p.a), *(range(*p.b) if p.label == FOLLOWS else ()))}
    assert covered == set(range(len(owner)))  # every sentence is in a pair, as A or as B that follows it


def test_half_of_the_pairs_follow_and_epochs_differ() -> None:
    documents = [[10] * 40 for _ in range(100)]
    plans = [plan for epoch in range(4) for plan in planned(documents, room=60, epoch=epoch)]
    n = len(plans)
    follows = sum(plan.label == FOLLOWS for plan in plans)
    assert abs(follows - n / 2) < 5 * math.sqrt(n / 4)
    assert planned(documents, epoch=0) != planned(documents, epoch=1)
    assert planned(documents, seed=1) != planned(documents, seed=2)
    others = np.bincount([plan.b[0] // 40 for plan in plans if plan.label == RANDOM], minlength=100)
    assert others.min() > 0  # any document may be the other


def test_pack_adds_special_tokens_and_segments() -> None:
    assert pack([7]).ids.tolist() == [BOS, 7, EOS] and pack([7]).segments.tolist() == [0, 0, 0]
    two = pack(np.array([7, 8]), np.array([9]))
    assert two.ids.tolist() == [BOS, 7, 8, EOS, 9, EOS] and two.segments.tolist() == [0, 0, 0, 0, 1, 1]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 50), st.integers(0, 99))
def test_the_longer_segment_is_cut_first(n_a: int, n_b: int, room: int, seed: int) -> None:
    a, b = fit(n_a, n_b, room, np.random.default_rng(seed))
    left_a, left_b = a.stop - a.start, b.stop - b.start
    assert a.start >= 0 and a.stop <= n_a and b.start >= 0 and b.stop <= n_b
    assert left_a + left_b == min(n_a + n_b, room)
    assert left_a >= 1 and left_b >= 1
    if left_a < n_a and left_b < n_b:
        assert abs(left_a - left_b) <= 1


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
