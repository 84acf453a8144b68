"""HTML pages from jinja2 templates: one file each, nothing loaded from elsewhere, all text escaped."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"


@cache
def _environment(folder: Path) -> Environment:
    return Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, *, folder: Path = TEMPLATES, **values: Any) -> Markup:
    """Render a template of `folder`, or of this package; `page.html` is the base of whole pages."""
    text = _environment(folder).get_template(template).render(values)
    # A file name that is not UTF-8 contains lone surrogates, which cannot be written.
    return Markup(text.encode("utf-8", "replace").decode("utf-8"))
