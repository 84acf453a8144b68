"""Read sentence pairs from tab-separated columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from transduce.data.lines import LineParser, read_rows


def read_tsv(path: Path, src_lang: str, tgt_lang: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, source and target of each pair."""
    for line, (src, tgt) in read_rows(path, _parser(src_lang, tgt_lang)):
        yield line, src, tgt


def _parser(src_lang: str, tgt_lang: str) -> LineParser:
    """Tab-separated columns without quoting: the first two, or those that line 1 names by language.

    A blank line is a pair with two empty sides.
    """
    n, src, tgt, has_header = 0, 0, 1, False

    def parse(line: str, number: int) -> tuple[str, str] | None:
        nonlocal n, src, tgt, has_header
        fields = line.split("\t")
        if not n:
            if len(fields) < 2:
                raise ValueError("no tab; expected source<TAB>target")
            n, names = len(fields), [field.strip().lower() for field in fields]
            if src_lang.lower() in names and tgt_lang.lower() in names:
                src, tgt, has_header = names.index(src_lang.lower()), names.index(tgt_lang.lower()), True
        if number == 1 and has_header:
            return None
        if len(fields) != n and line.strip():
            raise ValueError(f"line 1 has {n} columns, this line has {len(fields)}")
        return (fields[src], fields[tgt]) if len(fields) == n else ("", "")

    return parse
