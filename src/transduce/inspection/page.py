"""The page that shows the inside of a model: its files for a server, and as one file with recorded values."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Protocol, runtime_checkable

from transduce.inspection.parts import Part

MOST_BYTES = 3_000_000
"""Size of a kept page; the matrices of parts are left out, the last first, where they would not fit."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'"
_MODULES = re.compile(r"^// modules: (.*)$", re.MULTILINE)
_DROPPED = re.compile(r"^import .*\n|^export ", re.MULTILINE)


@runtime_checkable
class Recorded(Protocol):
    """What a page shows: an `Inspection`."""

    @property
    def parts(self) -> Sequence[Part]:
        """The parts of the model."""

    def to_json(self, values: Sequence[str] = ()) -> dict[str, Any]:
        """Plain data of all views, with the matrices of the parts in `values`."""


@cache
def read_page_file(name: str) -> str:
    """A file of the page."""
    return files("transduce.inspection").joinpath("page", name).read_text(encoding="utf-8")


def page_files() -> list[str]:
    """The names of the page's files."""
    return ["inspect.html", "inspect.css", "inspect.js", *_modules()]


def _modules() -> list[str]:
    listed = _MODULES.search(read_page_file("inspect.js"))
    assert listed is not None, "the first line of inspect.js lists the modules"
    return [name for name in listed[1].split() if name != "inspect.js"]


def kept_page(inspections: Sequence[Recorded]) -> str:
    """One file without network access, with the recorded values inside; works from file://.

    As many parts have their matrices as fit in `MOST_BYTES`: those of the first blocks of encoder and decoder first.
    """
    names = list(dict.fromkeys(part.name for one in inspections for part in one.parts))
    records: list[dict[str, Any]] = [one.to_json() for one in inspections]
    sizes = dict.fromkeys(names, 0)
    for one in inspections:
        for part in one.parts:
            sizes[part.name] = sizes.get(part.name, 0) + sum(
                3 * value.array.size + 90 for value in part.values.values()
            )
    first = sorted(names, key=lambda name: next((int(w) for w in name.split(".") if w.isdigit()), 0))
    room = MOST_BYTES - 250_000 - sum(len(json.dumps(record)) for record in records)
    chosen = list[str]()
    for name in first:
        if sizes[name] <= room:
            chosen.append(name)
            room -= sizes[name]
    data = json.dumps([one.to_json(chosen) for one in inspections], ensure_ascii=False, separators=(",", ":"))
    script = "\n".join(_DROPPED.sub("", read_page_file(name)) for name in [*_modules(), "inspect.js"])
    page = read_page_file("inspect.html")
    page = page.replace(
        '<link rel="stylesheet" href="inspect.css">', f"<style>\n{read_page_file('inspect.css')}</style>"
    )
    inside = data.replace("<", "\\u003c").encode("utf-8", "replace").decode("utf-8")
    records_tag = f'<script type="application/json" id="records">{inside}</script>'
    page = page.replace(
        '<script type="module" src="inspect.js"></script>', f'{records_tag}\n<script type="module">\n{script}</script>'
    )
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    return page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{policy}')
