"""Listening sockets: the address, the number of connections, and clients that do not read."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress

from transduce.errors import SettingsError

_MOST_CONNECTIONS = 1024
_OTHER_FILES = 100  # descriptors of the process that are no connections


def find_address(host: str, port: int) -> tuple[str, int]:
    """The IP address and port to listen on; port 0 becomes a free one. Raises `SettingsError`: it is taken.

    The HTTP server shares ports with other processes, so it would not notice another service on this port.
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            if sys.platform != "win32":  # there it allows to take the port of another process
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            found = probe.getsockname()
            return found[0], found[1]
    except (OSError, OverflowError) as error:
        raise SettingsError(f"{host}:{port}: {error}; give another --host or --port") from None


def max_connections() -> int:
    """Connections that this process can have, by its limit of open files: see `process.raise_file_limit`."""
    if sys.platform == "win32":
        return _MOST_CONNECTIONS
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_CONNECTIONS if limit < 0 else max(min(_MOST_CONNECTIONS, limit - _OTHER_FILES), 16)


def set_write_timeout(address: tuple[str, int], seconds: float) -> None:
    """Close connections whose client does not read what is sent for so many seconds (Linux).

    The HTTP server has no such limit. Connections inherit TCP_USER_TIMEOUT from their listening socket.
    """
    if sys.platform != "linux":
        return
    for name in os.listdir("/proc/self/fd"):
        if "socket:" not in os.path.realpath(f"/proc/self/fd/{name}"):
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and one.getsockname()[:2] == address:
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
