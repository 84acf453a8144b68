"""Write the pages of the site: the documentation, and what it links to elsewhere in the repository.

    python docs/build_site.py && zensical build --strict     --quick: without the outputs of notebooks

Readers of the site have no repository: a linked file of code becomes a page that shows it, a linked folder a list of
its files.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path

from latex2mathml.converter import convert

from transduce.config.architectures import MODEL_SETTINGS
from transduce.config.decoding import DecodingOptions, DecodingSettings
from transduce.config.section import Section
from transduce.config.settings import Corpus, Settings
from transduce.inspection.page import PAGE

ROOT = Path(__file__).parents[1]
PAGES = Path("build/pages").absolute()
SENTENCE = "When will the old doctor call his friend?"
BEAM = ("--beam", "4")
SMALL = ("--set", "model.d_model=64", "--set", "model.d_ff=128", "--set", "training.valid_bleu_sentences=0")
THEME = re.compile(r"^@font-face.*?\n|^:root \{.*?^\}\n", re.MULTILINE | re.DOTALL)  # its font and its colours
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
MATH = re.compile(r"(\$\$?)([^$]+)\1")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXCERPT = re.compile(r"^```py (\S+)$", re.MULTILINE)
COPIED = (".svg", ".png", ".woff2")
LANGUAGES = {".py": "python", ".toml": "toml", ".cpp": "cpp", ".h": "cpp", ".html": "html", ".css": "css", ".js": "js"}


def page_of(path: Path) -> Path:
    """The page of a file or a folder of the repository, relative to the folder of pages."""
    inside = path.relative_to(ROOT)
    page = inside.relative_to("docs") if inside.parts[:1] == ("docs",) else Path("repository") / inside
    if path.is_dir():
        return page / "index.md"
    if path.suffix in COPIED:
        return page
    return (
        page.with_name("index.md")
        if page.name == "README.md"
        else page.with_name(f"{page.name.removesuffix('.md')}.md")
    )


def with_links(text: str, path: Path, linked: list[Path]) -> str:
    """The text with links to pages; `linked` collects their files."""

    def link(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(path.parent / match[1]))
        linked.append(target)
        return f"]({os.path.relpath(page_of(target), page_of(path).parent)}"

    return LINK.sub(link, text)


def with_math(text: str) -> str:
    """The text with formulas in MathML, which browsers display without a script."""

    def math(match: re.Match[str]) -> str:
        display = "block" if match[1] == "$$" else "inline"
        return f'<span class="formula {display}">{convert(match[2], display=display)}</span>'

    return MATH.sub(math, text)


def markdown(path: Path, linked: list[Path], *, run: bool) -> str:
    """A page of Markdown as the site shows it."""
    text = with_outputs(path) if run and path.parent.name == "notebooks" else path.read_text(encoding="utf-8")
    text = EXCERPT.sub(r'```py title="\1"', text)
    parts = CODE.split(text)
    parts[::2] = [with_links(with_math(part), path, linked) for part in parts[::2]]
    page = "".join(parts)
    if "<!-- the page of the demo model -->" in page:
        page = page.replace("<!-- the page of the demo model -->", demo_links(run=run))
    return page.replace("<!-- the tables of settings -->", "".join(settings_tables()))


def with_outputs(path: Path) -> str:
    """A notebook with what its blocks print. They run in order, in one namespace and an empty folder."""
    namespace: dict[str, object] = {"__name__": "__main__"}

    def run(block: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block[1], str(path), "exec"), namespace)
        return block[0] + (f'\n\n```text title="output"\n{printed.getvalue()}```' if printed.getvalue() else "")

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return BLOCK.sub(run, path.read_text(encoding="utf-8"))


def demo_links(*, run: bool) -> str:
    """Links to pages that show the model of `make demo`, or else a smaller one that is trained here, once."""
    model, page, without = ROOT / "runs" / "demo", PAGES / "demo.html", PAGES / "demo-without-positions.html"
    if not (model / "report.html").exists():  # written at the end: an interrupted training continues
        model = ROOT / "build" / "demo"
    if run:
        if not (model / "report.html").exists():
            transduce("demo", "--run", model, "--updates", "400", *SMALL, "--quiet")
        transduce("inspect", model, SENTENCE, *BEAM, "--html", page)
        off = [word for side in ("src", "tgt") for word in ("--off", f"{side}_embedding.positions")]
        transduce("inspect", model, SENTENCE, *BEAM, *off, "--html", without)
    if not (page.exists() and without.exists()):
        return ""
    return (
        f'[Inside a small model](demo.html) that translates "{SENTENCE}", and '
        "[the same without positions](demo-without-positions.html) · "
    )


def transduce(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "transduce", *arguments], check=True, stdout=subprocess.DEVNULL)


def settings_tables() -> Iterator[str]:
    """A table for each section of the settings, and of `[model]` for each architecture."""
    yield from table("Top level", Settings)
    for name, field in Settings.model_fields.items():
        if name == "model":
            for kind, section in MODEL_SETTINGS.items():
                note = f"{section.__doc__}\n\nPresets: {', '.join(section.presets)}."
                yield from table(f'[model], kind = "{kind}"', section, note=note)
        elif isinstance(field.default, Section):
            yield from table(f"[{name}]", type(field.default))
    yield from table("An entry of data.train, data.valid or data.test", Corpus)
    yield from table("DecodingOptions", DecodingOptions, note="Those of `[decoding]`, and:", without=DecodingSettings)


def table(title: str, section: type[Section], *, note: str = "", without: type[Section] = Section) -> Iterator[str]:
    """The values of a section: name, default and description."""
    yield f"\n## {title}\n\n{note}\n\n| setting | default | |\n|---|---|---|\n"
    for name, field in section.model_fields.items():
        if name not in without.model_fields and not isinstance(field.default, Section):
            default = "*unset*" if field.default is None else f"`{json.dumps(field.default)}`"
            yield f"| `{name}` | {'' if field.is_required() else default} | {escape(field.description or '')} |\n"


def shown(path: Path, linked: list[Path]) -> str:
    """A page that shows a folder or a file of code."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        inside = sorted(p for p in path.iterdir() if not p.name.startswith(("_", ".")) and p.suffix != ".so")
        linked += inside
        links = (f"- [{p.name}]({os.path.relpath(page_of(p), page_of(path).parent)})\n" for p in inside)
        return f"# {name}\n\n" + "".join(links)
    text = path.read_text(encoding="utf-8")
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 3)
    header = f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n"
    return f"{header}{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text}\n{fence}\n"


def write_style() -> None:
    """The font and the colours of all pages, and the rules of the site."""
    theme = (PAGE / "theme.css").read_text(encoding="utf-8")
    rules = (ROOT / "docs" / "site.css").read_text(encoding="utf-8")
    (PAGES / "site.css").write_text("".join(THEME.findall(theme)) + rules, encoding="utf-8")
    for name in ("source-sans-3.woff2", "icon.svg"):
        shutil.copy(PAGE / name, PAGES)


def main(*, run: bool) -> None:
    """Write all pages. `run`: run the notebooks, for their outputs."""
    shutil.rmtree(PAGES, ignore_errors=True)
    todo, done = sorted((ROOT / "docs").glob("**/*.md")), set[Path]()
    while todo:
        path = todo.pop()
        if path in done or not path.exists():
            continue
        done.add(path)
        page = PAGES / page_of(path)
        page.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in COPIED:
            shutil.copy(path, page)
        elif (readme := path / "README.md").exists():
            todo.append(readme)
        else:
            is_page = path.suffix == ".md" and "src" not in path.parts
            page.write_text(markdown(path, todo, run=run) if is_page else shown(path, todo), encoding="utf-8")
    write_style()
    print(f"{len(done)} pages in {PAGES}")


if __name__ == "__main__":
    main(run="--quick" not in sys.argv)
