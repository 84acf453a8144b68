"""The page that shows the inside of a model: its files for a server, and as one file with recorded values."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "page"
_POLICY = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:; base-uri 'none'\">"
)
_DROPPED = re.compile(r"^import .*\n|^export ", re.MULTILINE)


@cache
def read_page_file(name: str) -> str:
    """A file of the page."""
    return (PAGE / name).read_text(encoding="utf-8")


def page_files() -> list[str]:
    """The names of the page's files."""
    return ["inspect.html", "inspect.css", *_modules("inspect.js")]


def _modules(script: str) -> list[str]:
    """A script, after the modules that it imports: its first line lists them."""
    return read_page_file(script).partition("\n")[0].removeprefix("// modules: ").split()


def script_of(name: str) -> str:
    """A script and its modules as one module."""
    return "\n".join(_DROPPED.sub("", read_page_file(one)) for one in _modules(name))


def page_of(records: Sequence[dict[str, Any]]) -> str:
    """One file with the records inside; it needs no network."""
    data = json.dumps(records, ensure_ascii=False, separators=(",", ":"))
    inside = data.replace("<", "\\u003c").encode("utf-8", "replace").decode("utf-8")
    parts = {
        '<meta charset="utf-8">': f'<meta charset="utf-8">\n{_POLICY}',
        '<link rel="stylesheet" href="inspect.css">': f"<style>\n{read_page_file('inspect.css')}</style>",
        '<script type="module" src="inspect.js"></script>': (
            f'<script type="application/json" id="records">{inside}</script>\n'
            f'<script type="module">\n{script_of("inspect.js")}</script>'
        ),
    }
    page = read_page_file("inspect.html")
    for tag, content in parts.items():
        page = page.replace(tag, content)
    return page
