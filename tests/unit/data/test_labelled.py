"""Files of labelled texts, and the errors for malformed ones."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from transduce.data.reading import Labelled, number_of, read_labelled, sorted_labels
from transduce.errors import DataError


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
