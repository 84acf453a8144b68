"""Examples of docstrings as blocks of code: Markdown would take their `>>>` for quotations."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)
FLAG = re.compile(r"\s*# doctest: .*")


def with_blocks(text: str) -> str:
    """The text of a docstring with its examples in fences, without the flags for doctest."""
    return EXAMPLE.sub(lambda example: f"```pycon\n{FLAG.sub('', example[0])}\n```", text)


class DoctestBlocks(Extension):
    """Called by mkdocstrings for each object of the package."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_blocks(obj.docstring.value)
