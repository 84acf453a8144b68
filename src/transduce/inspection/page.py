"""The HTML page of an inspection: its files for a server, or a single file with the recorded values."""

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
    "script-src 'unsafe-inline'; worker-src blob:; font-src data:; img-src data:; base-uri 'none'\">"
)
THEME_FILES = {"theme.css": "text/css", "source-sans-3.woff2": "font/woff2", "icon.svg": "image/svg+xml"}
"""Files that all pages share, with their MIME types."""
_TEXTS = {"en": "tour.en.json", "de": "tour.de.json"}
_STYLE = re.compile(r'<link rel="stylesheet" href="(.+?)">')
_DROPPED = re.compile(r"^import [^;]*;\n|^export ", re.MULTILINE)


@cache
def read_page_file(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def page_files() -> list[str]:
    styles = _STYLE.findall(read_page_file("inspect.html"))
    return list(dict.fromkeys(["inspect.html", *THEME_FILES, *_TEXTS.values(), *styles, *_modules("inspect.js")]))


def _modules(script: str) -> list[str]:
    """Return the modules of a script in the order of their imports, which the comment in its first line lists."""
    return read_page_file(script).partition("\n")[0].removeprefix("// modules: ").split()


def script_of(name: str, *, without: Sequence[str] = ()) -> str:
    """Join a script and the modules that it imports, except some, to one script."""
    modules = [module for module in _modules(name) if module not in without]
    return "\n".join(_DROPPED.sub("", read_page_file(module)) for module in modules)


def theme_colour(name: str) -> str:
    """Return a colour of the light theme by name, such as "#ffffff"."""
    return re.findall(rf"--{name}: light-dark\((#\w+)", read_page_file("theme.css"))[0]


def embed_files(text: str) -> str:
    """Replace the URLs of the font and of the icon by their contents."""
    for name, kind in THEME_FILES.items():
        address = f"data:{kind};base64,{b64encode((PAGE / name).read_bytes()).decode()}"
        text = text.replace(f"url({name})", f"url({address})").replace(
            f'"icon" href="{name}"', f'"icon" href="{address}"'
        )
    return text


def page_of(records: Sequence[dict[str, Any]]) -> str:
    """Return the page as one HTML file that contains records of inspections and needs no network."""
    return _page_with("records", records)


def page_of_model(data: dict[str, Any]) -> str:
    """Return the page as one HTML file that contains a model, computes with it, and needs no network."""
    return _page_with("site", data, "site.js")


def _page_with(name: str, content: Any, computing: str | None = None) -> str:
    """Return the page as one HTML file, with `content` as JSON in the element `name`.

    `computing`: a script that computes. It is no module, because a worker runs it too; the page sees its names.
    """
    own = f'<script id="computing">\n"use strict";\n{script_of(computing)}</script>\n' if computing else ""
    code = script_of("inspect.js", without=_modules(computing) if computing else ())
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    texts = {language: json.loads(read_page_file(file)) for language, file in _TEXTS.items()}
    inside = data.replace("<", "\\u003c").encode("utf-8", "replace").decode("utf-8")
    parts = {
        '<meta charset="utf-8">': f'<meta charset="utf-8">\n{_POLICY}',
        '<script type="module" src="inspect.js"></script>': (
            f'<script type="application/json" id="{name}">{inside}</script>\n'
            f'<script type="application/json" id="texts">{json.dumps(texts, ensure_ascii=False)}</script>\n'
            f'{own}<script type="module">\n{code}</script>'
        ),
    }
    page = _STYLE.sub(lambda link: f"<style>\n{read_page_file(link[1])}</style>", read_page_file("inspect.html"))
    page = embed_files(page)
    for tag, content in parts.items():
        page = page.replace(tag, content)
    return page
