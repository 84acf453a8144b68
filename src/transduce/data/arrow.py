"""Read sentence pairs from parquet, from Arrow files, and from a dataset saved by Hugging Face's `save_to_disk`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from transduce.data.json_lines import pair_of
from transduce.data.lines import bare_suffix, format_path, open_bytes
from transduce.errors import DataError, SettingsError

_ROWS = 1000  # of a parquet file that are in memory at once


def read_parquet(path: Path, src_lang: str, tgt_lang: str) -> Iterator[tuple[int, str, str]]:
    """Yield the number, source and target of each row, whose columns are named like the keys of JSON lines."""
    rows = _rows(path, lambda arrow, file: arrow.parquet.ParquetFile(file).iter_batches(batch_size=_ROWS))
    return _pairs(rows, path, src_lang, tgt_lang)


def read_arrow(path: Path, src_lang: str, tgt_lang: str) -> Iterator[tuple[int, str, str]]:
    """Yield the rows of an Arrow stream, or of a folder that `Dataset.save_to_disk` has written."""
    each = (_rows(file_path, lambda arrow, file: arrow.ipc.open_stream(file)) for file_path in arrow_files(path))
    return _pairs(chain.from_iterable(each), path, src_lang, tgt_lang)


def is_dataset(path: Path) -> bool:
    """Whether a path is a folder that `Dataset.save_to_disk` has written."""
    return (path / "state.json").is_file()


def arrow_files(path: Path) -> list[Path]:
    """The files of a saved dataset, in order; those of any other path are itself."""
    if not is_dataset(path):
        return [path]
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        selected, names = state.get("_indices_data_files"), [str(one["filename"]) for one in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path / 'state.json'}: not that of a saved dataset: {error!r}") from None
    if selected:
        raise DataError(f"{path}: its rows were selected or shuffled; call flatten_indices() before save_to_disk")
    return [path / Path(name).name for name in names]


def _rows(path: Path, read: Callable[[Any, Any], Iterable[Any]]) -> Iterator[Any]:
    """The rows of the batches that `read` gets from pyarrow and an open file."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise SettingsError(
            f"{format_path(path)}: this format needs pyarrow: pip install 'transduce[formats]'"
        ) from error
    with open_bytes(path, in_order=bare_suffix(path) != ".parquet") as (file, _):
        try:
            for batch in read(pyarrow, file):
                yield from batch.to_pylist()
        except (pyarrow.ArrowException, ValueError, OverflowError) as error:
            if "range requests" in str(error) or "Cannot seek streaming" in str(error):  # fsspec's
                reason = "its server sends no parts of files, which this format needs; download the file first"
                raise DataError(f"{format_path(path)}: {reason}") from None
            raise DataError(f"{format_path(path)}: not a valid {path.suffix[1:]} file: {error}") from None


def _pairs(rows: Iterable[Any], path: Path, src_lang: str, tgt_lang: str) -> Iterator[tuple[int, str, str]]:
    for number, row in enumerate(rows, 1):
        try:
            src, tgt = pair_of(row, src_lang, tgt_lang)
        except ValueError as error:
            raise DataError(f"{format_path(path)}, row {number}: {error}") from None
        yield number, src, tgt
