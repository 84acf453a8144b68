"""Find and load the C++ library (`native/`), and check what its functions return.

`make` builds the library where there is a C++ compiler.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from transduce.errors import SettingsError, TransduceError

_ABI_VERSION = 3
_LIBRARY = Path(__file__).with_name("libtransduce_native.so")
_INVALID = 1


@cache
def load_library() -> ctypes.CDLL | str:
    """The library, or the reason why it cannot be used. TRANSDUCE_NATIVE_LIBRARY names another file."""
    path = Path(os.environ.get("TRANSDUCE_NATIVE_LIBRARY") or _LIBRARY)
    if not path.exists():
        return "the native library is not built; `make native` builds it where there is a C++ compiler"
    try:
        library = ctypes.CDLL(str(path))
        version = library.transduce_abi_version()
    except (OSError, AttributeError) as error:
        return f"the native library cannot be loaded: {error}"
    if version != _ABI_VERSION:
        return "the native library is of another version; `make native` builds it again"
    library.transduce_last_error.restype = library.transduce_isa.restype = ctypes.c_char_p
    pointer, int64 = ctypes.c_void_p, ctypes.c_int64
    library.transduce_model_new.argtypes = [pointer, pointer, int64, pointer]
    library.transduce_job_new.argtypes = [*[pointer] * 5, int64, ctypes.c_int32, pointer]
    library.transduce_job_sizes.argtypes = [pointer] * 3
    library.transduce_job_results.argtypes = [pointer] * 7
    for name in ("model_free", "job_free", "job_cancel", "job_run"):
        getattr(library, f"transduce_{name}").argtypes = [pointer]
    if library.transduce_isa() is None:
        raise SettingsError(library.transduce_last_error().decode())
    return library


def check(library: ctypes.CDLL, code: int) -> None:
    """Raise the error that a function of the library has returned: `SettingsError` for arguments out of range."""
    if code:
        message = library.transduce_last_error().decode(errors="replace")
        raise SettingsError(message) if code == _INVALID else TransduceError(f"native library: {message}")
