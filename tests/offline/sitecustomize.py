"""Block the network in tests: an attempt to leave this machine is refused, recorded, and fails the test.

`tests/conftest.py` imports this module and puts this folder into PYTHONPATH, so that every Python process that a test
starts imports it too (Python imports any `sitecustomize`). An audit hook, which cannot be removed, sees all sockets of
Python code. Loopback is allowed in tests marked `loopback`; Unix sockets are always allowed. Native code is not seen:
`.ci/run` therefore runs the suite in a network namespace if the system allows one.
"""

import ipaddress
import os
import platform
import sys

OFF, LOOPBACK, LOG = "TRANSDUCE_TESTS_NETWORK", "TRANSDUCE_TESTS_LOOPBACK", "TRANSDUCE_TESTS_NETWORK_LOG"
"""Environment variables: "1" allows all connections; "1" allows loopback; a file that lists refused attempts."""

_ADDRESS = {"socket.connect": 1, "socket.bind": 1, "socket.sendto": 1, "socket.sendmsg": 1}
_NAME = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
_HERE = ("", "localhost", "0.0.0.0", "::", platform.node().lower())


class Blocked(OSError):
    """A test tried to use the network."""


def is_loopback(host: object) -> bool:
    """Whether a host names this machine, without a DNS query."""
    if host is None:
        return True
    text = host.decode("ascii", "replace") if isinstance(host, bytes) else str(host)
    if text.lower() in _HERE:
        return True
    try:
        return ipaddress.ip_address(text.split("%")[0]).is_loopback
    except ValueError:
        return False


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if not event.startswith("socket.") or os.environ.get(OFF) == "1":
        return
    if event in _NAME:
        host: object = arguments[0]
    elif event in _ADDRESS:
        address = arguments[_ADDRESS[event]]
        if not isinstance(address, tuple):
            return  # a Unix socket, or one that is connected already
        host = address[0]
    else:
        return
    if is_loopback(host) and os.environ.get(LOOPBACK) == "1":
        return
    attempt = f"{event} {host!r}"
    if path := os.environ.get(LOG):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{attempt} by {' '.join(sys.argv[:3])}\n")
    raise Blocked(f"no network in tests: {attempt}")


sys.addaudithook(_hook)
