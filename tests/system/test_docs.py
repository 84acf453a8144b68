"""The documentation matches the code: ```python blocks run, excerpts are in the code, links work.

The blocks of one file run in order in one namespace, in an empty folder. A block fenced as ```py with a path is an
excerpt of that file; a line of dots marks an omission. ```py alone is not run (test_site.py runs the tutorial's).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import transduce

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")])
FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXCERPT = re.compile(r"^```py (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ANY_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")


DEFINITION = re.compile(r"\[`(\w+)`\]\(([^)#\s]+\.py)\)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[tuple[int, str]]:
    """Return the Python blocks of a page, each with the number of its first line."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start(1)), found.group(1)) for found in FENCE.finditer(text)]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=pytest.mark.slow if page.parent.name == "notebooks" else ())
        for page in PAGES
        if blocks(page)
    ],
)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, source in blocks(page):
        code = compile("\n" * line + source, str(page), "exec")  # a traceback shows the line of the page
        exec(code, namespace)


def code_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_excerpts_match_the_files(page: Path) -> None:
    """Line for line and in order, whatever the indentation."""
    for path, excerpt in EXCERPT.findall(page.read_text(encoding="utf-8")):
        source, place = code_lines((ROOT / path).read_text(encoding="utf-8")), 0
        for part in re.split(r"^\.\.\.$", excerpt, flags=re.MULTILINE):
            wanted = code_lines(part)
            found = [n for n in range(place, len(source)) if source[n : n + len(wanted)] == wanted]
            assert found, f"{page.name} shows an excerpt that {path} does not contain:\n{part}"
            place = found[0] + len(wanted)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_files_exist(page: Path) -> None:
    targets = LINK.findall(ANY_FENCE.sub("", page.read_text(encoding="utf-8")))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page.name} links to {missing}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_linked_functions_are_defined_in_the_linked_file(page: Path) -> None:
    for name, target in DEFINITION.findall(page.read_text(encoding="utf-8")):
        source = (page.parent / target).read_text(encoding="utf-8")
        assert re.search(rf"^(?:def|class) {name}\b", source, re.MULTILINE), f"{page.name}: {target} defines no {name}"


def test_index_names_every_package_every_page_and_the_public_api() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "src" / "transduce").glob("*/__init__.py")}
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").glob("**/*.md")} - {"README.md"}
    wanted = [
        *(f"](../src/transduce/{name})" for name in packages),
        *(f"]({page})" for page in pages),
        *(f"`{name}`" for name in transduce.__all__ if name != "__version__"),
    ]
    missing = [part for part in wanted if part not in index]
    assert not missing, f"docs/README.md does not contain {missing}"
