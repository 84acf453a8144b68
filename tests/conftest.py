"""Shapes and types of every call into `transduce` are checked while tests run; workers keep off each other's cores."""

from __future__ import annotations

import os

from jaxtyping import install_import_hook

import transduce.data.demo  # noqa: F401  unchecked: it makes a million small calls, and holds no tensor

# Before any other import of the package; an int is good where a float is asked for (PEP 484).
install_import_hook("transduce", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

import pytest  # noqa: E402
import torch  # noqa: E402

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_seed_for_every_test() -> None:
    """A test that forgets to seed still gives the same numbers whatever ran before it."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
