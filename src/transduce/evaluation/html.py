"""Render HTML from jinja2 templates: self-contained pages in which all text is escaped."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from transduce.inspection.page import PAGE

FOLDERS = (Path(__file__).parent / "templates", PAGE)
"""Templates, and the style that they share with the inspection page."""


@cache
def environment(*, autoescape: bool = True) -> Environment:
    """The templates."""
    return Environment(
        loader=FileSystemLoader(FOLDERS),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, **values: Any) -> Markup:
    """Render a template. A whole page extends `page.html`."""
    text = environment().get_template(template).render(values)
    # A file name that is not UTF-8 contains lone surrogates, which cannot be written.
    return Markup(text.encode("utf-8", "replace").decode("utf-8"))
