"""Processes from a server that has already imported PyTorch, which starts them a hundred times faster."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def processes() -> ForkServerContext:
    """Its processes have one thread each if their target is a function of `toys`."""
    context = multiprocessing.get_context("forkserver")
    with pytest.MonkeyPatch.context() as patch:
        tests = Path(__file__).parents[1]
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tests.parent / "src"), str(tests)]))
        late = ["torch._dynamo", "sentencepiece", "sacrebleu", "transduce.pipeline"]  # commands import them
        context.set_forkserver_preload(["toys", *late])
        first = context.Process(target=int)
        first.start()
        first.join()
    return context
