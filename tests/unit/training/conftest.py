"""A test of training may choose the kernels; the next one has those of a new process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from transduce.native import kernels


@pytest.fixture(autouse=True)
def kernels_of_a_new_process() -> Iterator[None]:
    yield
    kernels.choose_kernels("auto")
