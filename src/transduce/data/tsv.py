"""Read sentence pairs from tab-separated columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from transduce.data.lines import read_lines
from transduce.errors import DataError


def read_tsv(path: Path, src_lang: str, tgt_lang: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, source and target of each pair: the first two columns, or those that a header names by language.

    There is no quoting. A blank line is a pair with two empty sides.
    """
    n, first, src, tgt = 0, 0, 0, 1
    for number, line in enumerate(read_lines(path), 1):
        fields = line.split("\t")
        if not n and line.strip():
            if len(fields) < 2:
                raise DataError(f"{path}, line {number}: no tab; expected source<TAB>target")
            n, first, names = len(fields), number, [field.strip().lower() for field in fields]
            if src_lang.lower() in names and tgt_lang.lower() in names:
                src, tgt = names.index(src_lang.lower()), names.index(tgt_lang.lower())
                continue
        if len(fields) != n and line.strip():
            raise DataError(f"{path}, line {number}: line {first} has {n} columns, this line has {len(fields)}")
        yield (number, fields[src], fields[tgt]) if len(fields) == n else (number, "", "")
