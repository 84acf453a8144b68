"""The network is blocked in tests, in this process and in those that it starts; loopback needs a mark."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from offline import sitecustomize as network

BLOCKED = "no network in tests"  # by the hook of this module, or of the same one that a worker began with
OUTSIDE = ("192.0.2.1", 80)  # TEST-NET-1 (RFC 5737): nobody is there, whatever the network
TRY = "import socket; s = socket.socket(); s.settimeout(1); s.connect(('192.0.2.1', 80))"


def tried() -> str:
    """What was noted, which is then forgotten."""
    log = Path(os.environ[network.LOG])
    text = log.read_text(encoding="utf-8")
    log.unlink()
    return text


@pytest.mark.parametrize("loopback", [False, pytest.param(True, marks=pytest.mark.loopback)])
def test_nothing_leaves_this_machine(loopback: bool) -> None:
    for family, address in ((socket.AF_INET, OUTSIDE), (socket.AF_INET6, ("2001:db8::1", 80))):
        with socket.socket(family) as one, pytest.raises(OSError, match=BLOCKED):
            one.connect(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one, pytest.raises(OSError, match=BLOCKED):
        one.sendto(b"?", OUTSIDE)
    with pytest.raises(OSError, match=BLOCKED):
        socket.getaddrinfo("example.org", 443)
    assert tried().count("\n") == 4


def test_nor_by_a_process_that_a_test_starts() -> None:
    done = subprocess.run([sys.executable, "-c", TRY], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and "no network in tests: socket.connect '192.0.2.1'" in done.stderr
    assert "192.0.2.1" in tried()


def test_loopback_is_closed_without_the_mark() -> None:
    with socket.socket() as one, pytest.raises(OSError, match=BLOCKED):
        one.bind(("127.0.0.1", 0))
    with socket.socket() as one, pytest.raises(OSError, match=BLOCKED):
        one.connect(("localhost", 9))
    assert "127.0.0.1" in tried()


@pytest.mark.loopback
def test_loopback_is_open_with_the_mark_in_processes_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        call = f"import socket; socket.create_connection(('127.0.0.1', {port})).sendall(b'hello')"
        caller = threading.Thread(target=lambda: subprocess.run([sys.executable, "-c", call], check=True, timeout=60))
        caller.start()
        server.settimeout(60)
        with server.accept()[0] as one:
            one.settimeout(60)
            assert one.recv(5) == b"hello"
        caller.join()


def test_sockets_in_the_file_system_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # such a name may have a hundred characters only
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as one:
        server.bind("here")
        server.listen()
        one.connect("here")
