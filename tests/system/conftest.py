"""Runs that tests of the service share, and processes from a server that has already imported PyTorch."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one core each."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-")  # short: the paths of its sockets have a limit
    node = {"num_cpus": 1, "object_store_memory": 80 << 20, "node_ip_address": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # for Ray, this machine is 127.0.0.1
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_USAGE_STATS_REPORT_URL", "http://127.0.0.1:9")  # it would report that they are disabled
        Path(folder, "ray_bootstrap_config.yaml").touch()  # it would ask the network which cloud this is
        patch.setenv("HOME", folder)
        patch.setenv("RAY_TMPDIR", folder)
        Path(folder, "ray").mkdir()  # newer versions write an address there and do not create it
        cluster = Cluster(initialize_head=True, head_node_args={**node, "temp_dir": folder, "include_dashboard": False})
        try:
            cluster.add_node(**node)
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
