"""The process of `transduce serve`: signals, its log, TLS, load."""

import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

import marians
from servers import Server, request

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no POSIX signals"),
]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LONG_REQUEST = request("/v1/translate", {"text": ["a man reads " * 12] * 128, "beam": 16, "max_length": 1024})


def test_a_hangup_while_the_runs_are_loaded_does_not_end_the_service(toy: Path) -> None:
    command = [sys.executable, "-c", _HANGUP_WHILE_LOADING, str(toy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "listening on" in done.stderr and "stopped" in done.stderr, done.stderr


_HANGUP_WHILE_LOADING = """
import os, signal, sys
from transduce.serving import server, service
load = service.Translator.load
def load_slowly(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGHUP)
    return load(*args, **kwargs)
service.Translator.load = load_slowly
greet = server._greet
def greet_and_end(*args):
    greet(*args)
    os.kill(os.getpid(), signal.SIGTERM)
server._greet = greet_and_end
from transduce.__main__ import main
sys.argv = ["transduce", "serve", "en-de=" + sys.argv[1], "--port", "0"]
sys.exit(main())
"""


def test_a_second_signal_says_that_requests_were_aborted(toy: Path) -> None:
    _stop_during_a_request(Server(f"en-de={toy}", "--deadline=60", "--max-tokens=10000000"))


def _stop_during_a_request(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(LONG_REQUEST)
        _wait_for_request(server)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log("1 are running")
        assert server.stop() == 0
    log = "".join(server.log)
    assert "some requests had not ended" in log and "Traceback" not in log


def test_abandoned_requests_hold_up_neither_others_nor_the_end_of_pytorchs_engine(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSDUCE_NATIVE_LIBRARY", "/no")
    server = Server(f"en-de={toy}", "--deadline=600", "--max-tokens=10000000")
    try:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(LONG_REQUEST)
                _wait_for_request(server)
            server.wait_for_log('"status": 499')
            assert server.request("/v1/translate", {"text": "two women"})[0] == 200
            server.log.clear()
        _stop_during_a_request(server)
    finally:
        server.process.kill()


def _wait_for_request(server: Server) -> None:
    deadline = time.monotonic() + 30
    while b"transduce_pending_requests 1.0" not in _metrics(server):
        assert time.monotonic() < deadline


def _metrics(server: Server) -> bytes:
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as page:
        content: bytes = page.read()
        return content


def test_tls(toy: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    server = Server(f"en-de={toy}", "--certificate", certificate, "--certificate-key", key)
    try:
        context = ssl.create_default_context(cafile=str(certificate))
        context.check_hostname = False
        with socket.create_connection(("127.0.0.1", server.port)) as silent:  # it begins no handshake
            with socket.create_connection(("127.0.0.1", server.port)) as plain, context.wrap_socket(plain) as client:
                client.sendall(request("/v1/translate", {"text": "two women"}))
                assert client.recv(4096).startswith(b"HTTP/1.1 200")
            silent.settimeout(20)
            assert silent.recv(1) == b""
    finally:
        assert server.stop() == 0


@pytest.mark.slow
def test_the_service_keeps_its_promises_under_load(tmp_path: Path) -> None:
    """The short form of `benchmarks/serving.py`."""
    run = marians.make_run(tmp_path / "toy")
    (tmp_path / "lines").write_text("".join(f"{line}\n" for line in marians.LINES), encoding="utf-8")
    names = ["malformed", "streams", "mixed", "overload", "shutdown"]
    command = [sys.executable, BENCHMARKS / "serving.py", *names, "--run", run, "--text", tmp_path / "lines"]
    done = subprocess.run([*map(str, command), "--scale", "0.001"], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert all(f"{name}:" in done.stdout for name in ("malformed", "streams", "mixed", "overload", "SIGTERM"))
