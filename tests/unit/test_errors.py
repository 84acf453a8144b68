from __future__ import annotations

import os
import signal

import pytest

from transduce.errors import Interrupted, is_out_of_memory, nearest
from transduce.process import call_c


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("out of memory"), False),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"), False),
    ],
    ids=str,
)
def test_out_of_memory_errors_of_every_library_are_recognised(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


def test_an_interrupted_run_exits_with_the_shells_code() -> None:
    assert Interrupted("stopped", signal=signal.SIGTERM).exit_code == 143


def test_nearest_suggests_only_similar_names() -> None:
    assert nearest("xyz", ["dropout"]) == ""


def test_c_functions_are_not_looked_up_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, `ctypes.CDLL(None)` raises a TypeError."""
    call_c("no_such_function")
    monkeypatch.setattr(os, "name", "nt")
    monkeypatch.setattr("ctypes.CDLL", lambda name: pytest.fail("ctypes.CDLL was called"))
    call_c("mallopt", -4, 0)
