"""Load the C++ library (`native/`). Errors that its functions return are raised as Python exceptions.

An installation compiles it next to this file if there is a C++ compiler.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate, chain
from pathlib import Path

import numpy as np

from transduce.errors import SettingsError, TransduceError

_ABI_VERSION = 31
_INVALID, _MEMORY = 1, 2
_VARIABLE = "TRANSDUCE_NATIVE_LIBRARY"


@cache
def load_library() -> ctypes.CDLL | str:
    """Load the library (or the file TRANSDUCE_NATIVE_LIBRARY) once; return it, or a message why it cannot be used."""
    given = os.environ.get(_VARIABLE)
    path = Path(given) if given else Path(__file__).with_name("libtransduce_native.so")
    if not path.exists():
        if given:
            return f"{_VARIABLE} = {given}: there is no such file"
        return "the native library is not built; install a C++ compiler, then transduce again"
    try:
        library = ctypes.CDLL(str(path))
        version = library.transduce_abi_version()
    except (OSError, AttributeError) as error:
        return f"the native library cannot be loaded: {error}"
    if version != _ABI_VERSION:
        return f"{path} is of another version; install transduce again"
    library.transduce_last_error.restype = library.transduce_isa.restype = ctypes.c_char_p
    pointer, int32, int64, double = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
    real = ctypes.c_float
    arguments = {
        "model_new": [pointer, pointer, int64, pointer, pointer],
        "queue_new": [pointer, int32, pointer],
        "queue_load": [pointer, pointer],
        "client_new": [pointer, pointer],
        "client_fd": [pointer, pointer],
        "submit": [pointer, pointer, int64, pointer, int64, double, int32],
        "cancel": [pointer, int64],
        "work": [pointer, double, pointer],
        "serve": [pointer],
        "collect": [pointer] * 5,
        "results": [pointer] * 11,
        "score": [*[pointer] * 4, int32, pointer],
        "loss": [pointer, int32],
        "embedding": [pointer, int32],
        "embedding_backward": [pointer, int32],
        "stack_memory": [pointer, pointer],
        "stack": [pointer, int32],
        "stack_backward": [pointer, int32],
        "muon": [pointer, int64, real, pointer, int32, int32],
        "adam": [pointer, int64, *[double] * 6, int32],
        "norm": [pointer, pointer, int64, int32, pointer],
    }
    for name, types in arguments.items():
        function = getattr(library, f"transduce_{name}")
        function.argtypes, function.errcheck = types, partial(_raise_error, library)
    for name in ("model_free", "queue_close", "queue_free", "client_close", "client_free"):
        function = getattr(library, f"transduce_{name}")
        function.argtypes, function.restype = [pointer], None
    if library.transduce_isa() is None:
        raise SettingsError(library.transduce_last_error().decode())
    return library


def instruction_set() -> str:
    """Return the CPU instruction set that the library uses, such as "avx512_vnni", or "" if there is no library."""
    library = load_library()
    return "" if isinstance(library, str) else library.transduce_isa().decode()


def loaded_library() -> ctypes.CDLL:
    """Return the library, for callers that know that it is available."""
    library = load_library()
    assert not isinstance(library, str), library
    return library


def _raise_error(library: ctypes.CDLL, code: int, _function: object, _arguments: object) -> None:
    """Raise the error that a function of the library has returned as `code`.

    Raises `SettingsError` for arguments out of range, `MemoryError` if there is too little memory.
    """
    if code:
        message = library.transduce_last_error().decode(errors="replace")
        errors: dict[int, type[Exception]] = {_INVALID: SettingsError, _MEMORY: MemoryError}
        raise errors.get(code, TransduceError)(message if code == _INVALID else f"native library: {message}")


def packed(rows: Sequence[Sequence[int] | np.ndarray]) -> tuple[array, array]:
    """Concatenate rows of token ids (int32); also return the offset of each row and, last, the total length (int64).

    Python's `array` takes a fraction of NumPy's time for the few ids of a sentence.

    Raises `SettingsError` for an id outside the range of 32-bit integers.
    """
    try:
        return array("i", chain.from_iterable(rows)), array("q", accumulate(map(len, rows), initial=0))
    except OverflowError:
        extreme = max(chain.from_iterable(rows), key=abs)
        raise SettingsError(f"token id {extreme}: no vocabulary is so large; give ids of the model's tokens") from None


def address(values: array | np.ndarray) -> int:
    """Return the memory address of an array's values."""
    return values.buffer_info()[0] if isinstance(values, array) else values.ctypes.data
