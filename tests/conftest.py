"""Check shapes and types of every call into `transduce`; give every xdist worker one thread.

No test uses the network: see `offline/sitecustomize.py`. Tests with a server on 127.0.0.1, or with several training
processes, are marked `loopback`.
"""

import atexit
import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

from offline import sitecustomize as network  # first: from here on sockets are watched

NETWORK_LOG = Path(tempfile.mkdtemp(prefix="transduce-network-")) / "tried"
atexit.register(shutil.rmtree, NETWORK_LOG.parent, ignore_errors=True)
os.environ[network.LOG] = str(NETWORK_LOG)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(network.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import jaxtyping  # noqa: E402

import checks  # noqa: E402
import transduce.demo.corpus  # noqa: E402, F401  unchecked: a million small calls and no tensors

checks.install("transduce")  # before any other import of the package

import pytest  # noqa: E402
import torch  # noqa: E402

gc.disable()  # until all tests are collected: it would look at half a million objects again and again

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# Under `nohup make test &` they are ignored, by the processes that tests start and signal too.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Allow loopback for tests with the mark, their fixtures and the processes that they start."""
    if item.get_closest_marker("loopback") is not None:
        os.environ[network.LOOPBACK] = "1"
    try:
        return (yield)
    finally:
        os.environ.pop(network.LOOPBACK, None)


@pytest.fixture(autouse=True)
def _no_network() -> Iterator[None]:
    """Fail a test that tried to use the network, itself or in a child process, even if it caught the error."""
    yield
    if NETWORK_LOG.exists():
        tried = NETWORK_LOG.read_text(encoding="utf-8")
        NETWORK_LOG.unlink()
        pytest.fail(f"the test used the network (a server on 127.0.0.1 needs the mark `loopback`):\n{tried}")


@pytest.fixture(scope="module")
def unchecked() -> Iterator[None]:
    """Turn the checks of shapes and types off where they take longer than the computation, which other tests check."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _same_start_for_every_test() -> None:
    """Make a test that forgets to seed independent of the tests before it, and check the first calls of functions."""
    torch.manual_seed(0)
    checks.begin_test()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of tests with the mark `anyio`, which are coroutines."""
    return "asyncio"


@pytest.fixture(scope="session")
def processes() -> ForkServerContext:
    """Starts processes a hundred times faster; they have one thread each if their target is a function of `toys`."""
    context = multiprocessing.get_context("forkserver")
    with pytest.MonkeyPatch.context() as patch:
        tests = Path(__file__).parent
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tests.parent / "src"), str(tests)]))
        late = ["torch._dynamo", "sentencepiece", "sacrebleu", "transduce.pipeline"]  # commands import them
        context.set_forkserver_preload(["toys", *late])
        first = context.Process(target=int)
        first.start()
        first.join()
    return context


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without one."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
