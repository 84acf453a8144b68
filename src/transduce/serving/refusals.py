"""Refuses requests at the end of their headers: under overload, a refusal must cost less than a translation."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence

from starlette.responses import Response

from transduce.serving.http import Endpoint, Server

_LOG_SECONDS = 1.0


class Refusals:
    """The responses to requests that the service has no place for, ready to be sent by the HTTP protocol.

    What is refused is decided by the service's `Admission`. Requests by patterns of paths go to the application, which
    asks it too.
    """

    def __init__(self, server: Server, endpoints: Sequence[Endpoint], *, any_origin: bool) -> None:
        """`any_origin`: let pages of every origin read that the service is overloaded."""
        self._server, self._any_origin = server, any_origin
        self._endpoints = {one.path.encode(): one for one in endpoints if one.method == "POST" and not one.is_open}
        self._responses: dict[tuple[str, str, int], bytes] = {}
        self._unlogged = Counter[str]()
        self._n_coming = 0

    def response(self, method: bytes, url: bytes) -> bytes | None:
        """The response to a request whose headers have arrived; None: the application answers it."""
        endpoint = self._endpoints.get(url.partition(b"?")[0]) if method == b"POST" else None
        if endpoint is None:
            return None
        error = self._server.service.refusal(self._n_coming)
        if error is None:
            if not self._n_coming:
                asyncio.get_running_loop().call_soon(self._forget_coming)
            self._n_coming += 1
            return None
        self._count(endpoint.path)
        key = endpoint.path, str(error), math.ceil(error.retry_after)
        if key not in self._responses:
            self._responses[key] = self._bytes(self._server.error_response(endpoint, error))
        return self._responses[key]

    def _forget_coming(self) -> None:
        """Before the application begins with the requests that came in this step of the event loop, and counts them."""
        self._n_coming = 0

    def _bytes(self, response: Response) -> bytes:
        if self._any_origin:
            response.headers["access-control-allow-origin"] = "*"
        fields = b"".join(b"%s: %s\r\n" % field for field in response.raw_headers)
        return b"HTTP/1.1 429 Too Many Requests\r\n%s\r\n%s" % (fields, response.body)

    def _count(self, path: str) -> None:
        self._server.metrics.count_refusal(path)
        if self._server.log:
            if not self._unlogged:
                asyncio.get_running_loop().call_later(_LOG_SECONDS, self.write_log)
            self._unlogged[path] += 1

    def write_log(self) -> None:
        """Print one line for all refusals of a second: a line for each would cost as much as the refusal."""
        for path, n in self._unlogged.items():
            line = {"time": round(time.time(), 3), "route": f"POST {path}", "status": 429, "requests": n}
            print(json.dumps(line), file=sys.stderr, flush=True)
        self._unlogged.clear()
