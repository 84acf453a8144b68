"""The access log: a line of JSON per request on stderr."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from transduce.logging import escape

_SECONDS = 1.0
_REFUSED = 429


class AccessLog:
    """Prints a line per request, and one per second and route for all that are refused because of the load."""

    def __init__(self, *, with_texts: bool) -> None:
        self._with_texts = with_texts
        self._refused = Counter[str]()

    def write(self, route: str, status: int, seconds: float, n_characters: int, key: str, texts: Sequence[str]) -> None:
        """Log a response. `key`: the name of the client's API key, if it has one."""
        if status == _REFUSED:
            if not self._refused:
                asyncio.get_running_loop().call_later(_SECONDS, self.flush)
            self._refused[route] += 1
            return
        line = {"route": route, "status": status, "ms": round(1000 * seconds, 1), "characters": n_characters}
        _print(line | ({"key": key} if key else {}) | ({"texts": texts} if self._with_texts else {}))

    def flush(self) -> None:
        """Print the refusals that have not been printed yet."""
        for route, n in self._refused.items():
            _print({"route": route, "status": _REFUSED, "requests": n})
        self._refused.clear()


def _print(line: dict[str, Any]) -> None:
    text = json.dumps({"time": round(time.time(), 3), **line}, ensure_ascii=False)
    sys.stderr.write(escape(text) + "\n")  # in one piece: others write too
