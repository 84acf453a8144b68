"""What the documentation shows, runs: every ```python block of README.md and docs/*.md.

The blocks of one file run in order in one namespace, in an empty folder. A block that only shows a shape or an
excerpt is fenced as ```text.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")])
FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")


def blocks(page: Path) -> list[tuple[int, str]]:
    """The Python blocks of a page, each with the number of the line that it begins at."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start(1)), found.group(1)) for found in FENCE.finditer(text)]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, source in blocks(page):
        code = compile("\n" * line + source, str(page), "exec")  # a traceback shows the line of the page
        exec(code, namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page.name} links to {missing}"


def test_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").glob("**/*.md")]
    missing = [page for page in pages if page != "README.md" and page not in LINK.findall(index)]
    assert not missing, f"docs/README.md does not name {missing}"
