"""Read sentence pairs from one JSON object per line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transduce.data.lines import LineParser, one_line, read_rows

_SURROGATES = re.compile(r"[\ud800-\udfff]")


def read_json_lines(path: Path, src_lang: str, tgt_lang: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, source and target of each pair."""
    for line, (src, tgt) in read_rows(path, _parser(src_lang, tgt_lang)):
        yield line, src, tgt


def _parser(src_lang: str, tgt_lang: str) -> LineParser:
    """One JSON object per line with the keys `src` and `tgt` or the language codes, possibly inside `translation`."""

    def parse(line: str, number: int) -> tuple[str, str]:
        if not line.strip():
            return "", ""
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not valid JSON: {getattr(error, 'msg', None) or error}") from None
        return pair_of(value, src_lang, tgt_lang)

    return parse


def pair_of(value: Any, src_lang: str, tgt_lang: str) -> tuple[str, str]:
    """Source and target of an object. Raises `ValueError` where it does not contain both as strings."""
    sides = _sides(value, src_lang, tgt_lang)
    if sides is None:
        keys = dict.fromkeys([("src", "tgt"), (src_lang, tgt_lang)])  # the same twice if the languages are unset
        raise ValueError("expected " + " or ".join(f'{{"{src}": "...", "{tgt}": "..."}}' for src, tgt in keys))
    if any(_SURROGATES.search(side) for side in sides):
        raise ValueError("half of a surrogate pair is not a character")
    return one_line(sides[0]), one_line(sides[1])


def _sides(value: Any, src_lang: str, tgt_lang: str) -> tuple[str, str] | None:
    """Source and target of a JSON object, or None where it does not contain both as strings."""
    if isinstance(value, dict) and isinstance(value.get("translation"), dict):
        value = value["translation"]
    if not isinstance(value, dict):
        return None
    for src_key, tgt_key in (("src", "tgt"), (src_lang, tgt_lang)):
        src, tgt = value.get(src_key), value.get(tgt_key)
        if isinstance(src, str) and isinstance(tgt, str):
            return src, tgt
    return None
