"""Render HTML from jinja2 templates: self-contained pages in which all text is escaped."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"


@cache
def environment(folder: Path, *, autoescape: bool = True) -> Environment:
    """The templates of `folder` and of this package."""
    return Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, *, folder: Path = TEMPLATES, **values: Any) -> Markup:
    """Render a template of `folder` or of this package. A whole page extends `page.html`."""
    text = environment(folder).get_template(template).render(values)
    # A file name that is not UTF-8 contains lone surrogates, which cannot be written.
    return Markup(text.encode("utf-8", "replace").decode("utf-8"))
