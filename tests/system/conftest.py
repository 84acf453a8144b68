"""Runs that tests of the service share, and processes from a server that has already imported PyTorch."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

import marians
import text_runs


@pytest.fixture(scope="session")
def processes() -> ForkServerContext:
    """Starts processes a hundred times faster; they have one thread each if their target is a function of `toys`."""
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


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that translates."""
    return marians.make_run(tmp_path_factory.mktemp("runs") / "toy")


@pytest.fixture(scope="session")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model."""
    return text_runs.make_run(tmp_path_factory.mktemp("runs") / "gpt", **text_runs.GPT)
