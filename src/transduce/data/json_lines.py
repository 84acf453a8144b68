"""Read sentence pairs from one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transduce.data.lines import format_path, one_line, read_lines
from transduce.errors import DataError
from transduce.text.special import characters


def read_json_lines(path: Path, src_lang: str, tgt_lang: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, source and target of each pair. A blank line is a pair with two empty sides."""
    for number, line in enumerate(read_lines(path), 1):
        try:
            src, tgt = pair_of(json.loads(line), src_lang, tgt_lang) if line.strip() else ("", "")
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(
                f"{format_path(path)}, line {number}: not valid JSON: {getattr(error, 'msg', error)}"
            ) from None
        except ValueError as error:
            raise DataError(f"{format_path(path)}, line {number}: {error}") from None
        yield number, src, tgt


def pair_of(value: Any, src_lang: str, tgt_lang: str) -> tuple[str, str]:
    """Source and target of an object with the keys `src` and `tgt` or the language codes, possibly in `translation`.

    Raises `ValueError` where it does not contain both as strings.
    """
    keys = dict.fromkeys([("src", "tgt"), (src_lang, tgt_lang)])  # the same twice if the languages are unset
    if isinstance(value, dict) and isinstance(value.get("translation"), dict):
        value = value["translation"]
    for src_key, tgt_key in keys if isinstance(value, dict) else ():
        src, tgt = value.get(src_key), value.get(tgt_key)
        if isinstance(src, str) and isinstance(tgt, str):
            if characters(src + tgt) != src + tgt:
                raise ValueError("half of a surrogate pair is not a character")
            return one_line(src), one_line(tgt)
    expected = " or ".join(f'{{"{src}": "...", "{tgt}": "..."}}' for src, tgt in keys)
    kind = type(value).__name__
    found = str({key: type(item).__name__ for key, item in value.items()})[:200] if isinstance(value, dict) else kind
    raise ValueError(f"expected {expected} (data.src_lang and data.tgt_lang name other keys), found {found}")
