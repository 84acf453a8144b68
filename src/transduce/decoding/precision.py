"""The precisions of an engine, and the one that `auto` stands for: the fastest whose measured loss is small.

precisions.json of a run folder has the BLEU of each precision on validation text; `evaluation.precisions` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from transduce.decoding.native_library import instruction_set
from transduce.decoding.native_model import PRECISIONS, NativePrecision
from transduce.errors import RunFolderError, SettingsError
from transduce.runs.atomic import expecting
from transduce.runs.folder import RunFolder
from transduce.runs.tensor_file import load_metadata

Precision = Literal["float32", "bfloat16"]
"""Of weights in PyTorch."""
AnyPrecision = Precision | NativePrecision | Literal["auto"]

RECORD = "precisions.json"
MOST_LOSS = 0.1
"""BLEU that a precision may lose to float32."""
_FASTEST_FIRST = PRECISIONS[::-1]
_INT8_SETS = ("avx512_vnni", "amx")  # others have no instruction for it: int8 is no faster than float32
_UNMEASURED: NativePrecision = "float32-fast"  # nearly always gives float32's tokens


def check_precision(precision: str, *, on_cpu: bool) -> None:
    """Raise `SettingsError` unless this is one of `AnyPrecision` that the device has."""
    if precision not in (allowed := ("auto", *PRECISIONS, "bfloat16")):
        raise SettingsError(f"precision = {precision!r}: allowed are {', '.join(allowed)}")
    if not on_cpu and precision not in ("auto", "float32", "bfloat16"):
        raise SettingsError(f"precision = {precision!r} needs device = 'cpu'; or use float32 or bfloat16")


def auto_precision(folder: RunFolder) -> tuple[NativePrecision, str]:
    """The precision for a model in the native library, and the reason if it may give other tokens than float32.

    Raises `RunFolderError` if the record is damaged. A record of other weights counts as none.
    """
    try:
        with expecting(folder.path / RECORD):
            record = folder.read_record(RECORD)
            if not record or record["model"] != model_digest(folder):
                return _UNMEASURED, ""
            bleu, n = {name: float(record["bleu"][name]) for name in _FASTEST_FIRST}, int(record["sentences"])
    except RunFolderError as error:
        again = f"transduce evaluate {folder.path} --src FILE --ref FILE --measure-precisions"
        raise RunFolderError(f"{error}; name a precision, or measure again with `{again}`") from error
    fastest = _FASTEST_FIRST if instruction_set() in _INT8_SETS else _FASTEST_FIRST[1:]
    good: Iterator[NativePrecision] = (name for name in fastest if round(bleu["float32"] - bleu[name], 2) <= MOST_LOSS)
    best: NativePrecision = next(good, "float32")
    if best != "int8":
        return best, ""
    return best, f"{bleu[best]:.2f} BLEU on {n:,} validation sentences, {bleu['float32']:.2f} in float32"


def model_digest(folder: RunFolder) -> Any:
    """The checksum in the file of weights."""
    return load_metadata(folder.path / "model.safetensors").get("sha256")
