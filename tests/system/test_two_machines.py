"""Two machines, as network namespaces with a cable between them, one of which is cut off."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kills import events
from system.commands import small, write_corpus

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

NODES = {"transduce-a": "10.231.7.1", "transduce-b": "10.231.7.2"}
CONF = "last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=4"  # seconds, enough for a busy machine


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def cable() -> Iterator[None]:
    """The namespaces; the device in each is called `cable`."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux, root and iproute2")
    first, second = NODES
    try:
        for node in NODES:
            ip("netns", "add", node)
        ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.decode().strip()}")
    else:
        for node, address in NODES.items():
            ip("-n", node, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("cable", "lo"):
                ip("-n", node, "link", "set", device, "up")
        yield
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "delete", node], capture_output=True, check=False)


def start(node: str, log: Path, *arguments: object) -> subprocess.Popen[bytes]:
    """torchrun with one process on a machine; the first one has the rendezvous."""
    conf = f"{CONF},is_host={int(node == 'transduce-a')}"
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{NODES['transduce-a']}:29400", "--rdzv-conf", conf)
    rest = ("--nnodes", "1:2", "--nproc-per-node", 1, "--max-restarts", 9, "--local-addr", NODES[node])
    command = ["ip", "netns", "exec", node, sys.executable, "-m", "torch.distributed.run", *rendezvous, *rest]
    own = {"GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1", "TRANSDUCE_TESTS_NETWORK": "1"}
    own["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a machine that joins later would wait for a shared store in vain
    with log.open("ab") as file:
        return subprocess.Popen(
            [*map(str, command), "-m", "--", "transduce", *map(str, arguments)],
            env={**os.environ, **own},
            stdout=file,
            stderr=file,
        )


def power_off(machine: subprocess.Popen[bytes]) -> None:
    """Kill torchrun and the process that it started."""
    children = Path(f"/proc/{machine.pid}/task/{machine.pid}/children")
    pids = [machine.pid, *map(int, children.read_text().split() if children.exists() else ())]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    machine.wait()


def wait_for(log: Path, text: str, *, after: int = 0) -> int:
    """Wait until the log of a machine has the text after a position; return the position behind it."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        place = log.read_text().find(text, after)
        if place >= 0:
            return place + len(text)
        time.sleep(0.1)
    raise AssertionError(f"{text!r}: not in the log\n{log.read_text()}")


def wait_for_updates(machine: subprocess.Popen[bytes], log: Path, run: Path, *, more: int) -> None:
    """Wait until the log has so many more lines, one for every ten updates."""
    n = len(events(run, "update"))
    while len(events(run, "update")) < n + more:
        assert machine.poll() is None, log.read_text()
        time.sleep(0.1)


def test_a_machine_that_is_cut_off_is_named_and_the_other_one_goes_on_until_it_comes_back(
    tmp_path: Path, cable: None
) -> None:
    """From the last checkpoint, alone; then both again, after torchrun has been started again on the lost machine."""
    src, tgt = write_corpus(tmp_path, "train", 200)
    run, first, second = tmp_path / "run", tmp_path / "a.log", tmp_path / "b.log"
    limits = ("training.max_updates=1000000", "training.valid_updates=1000000", "training.save_updates=50")
    settings = small(*limits, "training.timeout=0.1", "training.batch_tokens=128")
    asked = ("train", "--src", src, "--tgt", tgt, "--run", run, *settings)
    machines = [start("transduce-a", first, *asked), start("transduce-b", second, *asked)]
    try:
        wait_for_updates(machines[0], first, run, more=10)
        ip("-n", "transduce-b", "link", "set", "cable", "down")
        place = wait_for(first, "from process 2 of 2 (")
        place = wait_for(first, "had 2 processes until update", after=place)
        wait_for_updates(machines[0], first, run, more=3)
        power_off(machines[1])
        ip("-n", "transduce-b", "link", "set", "cable", "up")
        machines[1] = start("transduce-b", second, *asked)
        wait_for(first, "had 1 process until update", after=place)
        wait_for_updates(machines[0], first, run, more=3)
    finally:
        for machine in machines:
            power_off(machine)
    assert [event["processes"] for event in events(run, "start")] == [2]
    assert len(events(run, "restart")) == 2
