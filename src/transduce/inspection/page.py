"""The inspection page of a model: its files for a server, or one file with recorded values."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "page"
_POLICY = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; font-src data:; img-src data:; base-uri 'none'\">"
)
_FONT = "source-sans-3.woff2"
_TEXTS = {"en": "tour.en.json", "de": "tour.de.json"}
_STYLE = re.compile(r'<link rel="stylesheet" href="(.+?)">')
_DROPPED = re.compile(r"^import [^;]*;\n|^export ", re.MULTILINE)


@cache
def read_page_file(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def page_files() -> list[str]:
    styles = _STYLE.findall(read_page_file("inspect.html"))
    return ["inspect.html", _FONT, *_TEXTS.values(), *styles, *_modules("inspect.js")]


def _modules(script: str) -> list[str]:
    """Return the modules of a script in the order of their imports, from the comment in its first line."""
    return read_page_file(script).partition("\n")[0].removeprefix("// modules: ").split()


def script_of(name: str) -> str:
    """Join a script and its modules to one module."""
    return "\n".join(_DROPPED.sub("", read_page_file(module)) for module in _modules(name))


def page_of(records: Sequence[dict[str, Any]]) -> str:
    """Return the page as one file that contains the records and needs no network."""
    data = json.dumps(records, ensure_ascii=False, separators=(",", ":"))
    texts = {language: json.loads(read_page_file(name)) for language, name in _TEXTS.items()}
    inside = data.replace("<", "\\u003c").encode("utf-8", "replace").decode("utf-8")
    font = b64encode((PAGE / _FONT).read_bytes()).decode()
    parts = {
        f"url({_FONT})": f"url(data:font/woff2;base64,{font})",
        '<meta charset="utf-8">': f'<meta charset="utf-8">\n{_POLICY}',
        '<script type="module" src="inspect.js"></script>': (
            f'<script type="application/json" id="records">{inside}</script>\n'
            f'<script type="application/json" id="texts">{json.dumps(texts, ensure_ascii=False)}</script>\n'
            f'<script type="module">\n{script_of("inspect.js")}</script>'
        ),
    }
    page = _STYLE.sub(lambda link: f"<style>\n{read_page_file(link[1])}</style>", read_page_file("inspect.html"))
    for tag, content in parts.items():
        page = page.replace(tag, content)
    return page
