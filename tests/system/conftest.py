"""Runs that tests of the service share, a browser, and a cluster."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import marians
import text_runs
from shared import build_once
from transduce import Translator


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all xdist workers, for `build_once`."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"


@pytest.fixture(scope="session")
def toy(shared: Path) -> Path:
    """A run that translates."""
    return build_once(shared / "runs" / "toy", marians.make_run)


@pytest.fixture(scope="session")
def translator(toy: Path) -> Translator:
    return Translator.load(toy)


@pytest.fixture(scope="session")
def gpt(shared: Path) -> Path:
    """A language model."""
    return build_once(shared / "runs" / "gpt", lambda folder: text_runs.make_run(folder, **text_runs.GPT))


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder to which the browser writes."""
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def browser(downloads: Path) -> Iterator[Any]:
    from system.browsers import start_browser

    driver = start_browser(downloads)
    yield driver
    driver.quit()


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
