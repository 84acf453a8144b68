from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from transduce.data.workers import spooled
from transduce.errors import RunFolderError


def test_a_read_error_of_the_source_is_not_reported_as_a_write_error(tmp_path: Path) -> None:
    def records() -> Iterator[int]:
        yield 1
        raise OSError(5, "Input/output error", "corpus.txt")

    with pytest.raises(OSError, match=r"corpus.txt"):
        spooled(records(), tmp_path, int)


def test_a_folder_that_cannot_be_written_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"cannot write temporary data in .*missing: No such file"):
        spooled([1], tmp_path / "missing", int)
