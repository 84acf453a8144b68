"""The network is blocked in tests and in the processes that they start; loopback needs a mark."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from offline import sitecustomize as network

BLOCKED = "no network in tests"  # from the hook of this process
OUTSIDE = ("192.0.2.1", 80)  # TEST-NET-1 (RFC 5737): an address that nobody has
TRY = "import socket; s = socket.socket(); s.settimeout(1); s.connect(('192.0.2.1', 80))"


def attempts() -> str:
    """Return the recorded attempts and remove the record."""
    log = Path(os.environ[network.LOG])
    text = log.read_text(encoding="utf-8")
    log.unlink()
    return text


@pytest.mark.parametrize("loopback", [False, pytest.param(True, marks=pytest.mark.loopback)])
def test_connections_to_other_machines_are_refused(loopback: bool) -> None:
    for family, address in ((socket.AF_INET, OUTSIDE), (socket.AF_INET6, ("2001:db8::1", 80))):
        with socket.socket(family) as one, pytest.raises(OSError, match=BLOCKED):
            one.connect(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one, pytest.raises(OSError, match=BLOCKED):
        one.sendto(b"?", OUTSIDE)
    with pytest.raises(OSError, match=BLOCKED):
        socket.getaddrinfo("example.org", 443)
    assert attempts().count("\n") == 4


def test_connections_of_child_processes_are_refused() -> None:
    done = subprocess.run([sys.executable, "-c", TRY], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and "no network in tests: socket.connect '192.0.2.1'" in done.stderr
    assert "192.0.2.1" in attempts()


def test_loopback_is_refused_without_the_mark() -> None:
    with socket.socket() as one, pytest.raises(OSError, match=BLOCKED):
        one.bind(("127.0.0.1", 0))
    with socket.socket() as one, pytest.raises(OSError, match=BLOCKED):
        one.connect(("localhost", 9))
    assert "127.0.0.1" in attempts()
