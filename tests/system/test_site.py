"""The site of the documentation is complete, links resolve, nothing is loaded from elsewhere; the tutorial works."""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from servers import Server
from system.test_readme import at_small_size, run_line

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "use": "href"}
NEEDED = ("zensical", "mkdocstrings_handlers.python", "latex2mathml")


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


class Page(HTMLParser):
    """The anchors, the links and the loaded resources of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links, self.loads = {""}, list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.anchors |= {found.get("id", ""), found.get("name", "") if tag == "a" else ""}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in LOADS and LOADS[tag] in found and found.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(found[LOADS[tag]])


def broken(path: Path, page: Page, pages: dict[Path, Page]) -> Iterator[str]:
    """The links of a page to files or anchors that the site does not have."""
    for link in (*page.links, *page.loads):
        if re.match(r"\w+:", link):
            continue
        address, anchor = urldefrag(link)
        target = (path.parent / unquote(address)).resolve() if address else path
        target = target / "index.html" if target.is_dir() else target
        if not target.exists() or (anchor and target in pages and unquote(anchor) not in pages[target].anchors):
            yield link


@pytest.mark.slow
@pytest.mark.loopback
def test_the_site_builds_strictly_links_resolve_and_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    """Without the outputs of the notebooks, which another test runs."""
    if missing := [name for name in NEEDED if not is_installed(name)]:
        pytest.skip(f"the extra `docs` is not installed: no {', '.join(missing)}")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for name in ("src", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for command in ([ROOT / "docs" / "build_site.py", "--quick"], ["-m", "zensical", "build", "--strict"]):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "build" / "site"
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert len(pages) > 100

    del pages[site / "404.html"]  # its links begin at the root of a server
    assert not [
        f"{path.relative_to(site)}: {link}" for path, page in pages.items() for link in broken(path, page, pages)
    ]

    # Scripts contain addresses of optional features (diagrams, repository figures) that the site does not use.
    assert not [load for page in pages.values() for load in page.loads if re.match(r"(\w+:)?//", load)]
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", path.read_text(encoding="utf-8")), path

    assert (
        "transduce.decoding.translator.Translator.translate" in pages[site / "reference" / "translation.html"].anchors
    )
    assert "label_smoothing" in (site / "reference" / "settings.html").read_text(encoding="utf-8")
    assert "beam" in (site / "search.json").read_text(encoding="utf-8")

    start = (site / "index.html").read_text(encoding="utf-8")
    assert (
        all(f"<strong>{door}</strong>" in start for door in ("Translate", "Learn", "Research"))
        and "<iframe" not in start
    )
    examples = [
        path for path in (site / "reference").glob("*.html") if "&gt;&gt;&gt;" in path.read_text(encoding="utf-8")
    ]
    assert len(examples) >= 5
    for path in (site / "reference").glob("*.html"):  # an example that is no block of code is a quotation
        assert "<blockquote>" not in path.read_text(encoding="utf-8"), path
    if shutil.which("chromedriver") is not None:
        check_with_browser(site, tmp_path)


def check_with_browser(site: Path, downloads: Path) -> None:
    """Pages fit a phone, formulas that do not fit scroll, and the search of a served site finds something."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    from system.browsers import logged_problems, start_browser, wait

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser = start_browser(downloads)
    try:
        size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for page in ("index.html", "model.html", "family.html"):
            browser.get((site / page).as_uri())
            assert browser.execute_script("return document.documentElement.scrollWidth <= 390"), page
        widths = "return [...document.querySelectorAll('.formula')].map((one) => one.scrollWidth - one.clientWidth)"
        assert max(browser.execute_script(widths)) > 0, "a formula is wider than its place and scrolls there"

        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        logged_problems(browser)
        browser.get(f"http://127.0.0.1:{server.server_port}/index.html")
        wait(lambda: browser.find_elements(By.CSS_SELECTOR, ".md-search__button"))[0].click()
        results = "return document.activeElement.shadowRoot?.textContent ?? ''"
        wait(lambda: browser.execute_script("return document.activeElement.shadowRoot !== null"))
        ActionChains(browser).send_keys("label smoothing").perform()
        wait(lambda: "smoothing" in browser.execute_script(results).lower())
        assert browser.execute_script("return document.fonts.check('12px \"Source Sans 3\"')")
        assert not logged_problems(browser)
    finally:
        browser.quit()
        server.shutdown()


@pytest.mark.slow
@pytest.mark.loopback
def test_the_tutorial_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order and at small sizes: its blocks, and its requests to a server of the run that they train."""
    monkeypatch.chdir(tmp_path)
    requests = list[str]()
    for language, block in FENCE.findall(TUTORIAL.read_text(encoding="utf-8")):
        if language in ("python", "py"):
            block = block.replace("30_000", "200").replace("300)", "10)").replace("500)", "10)")
            exec(compile(block, str(TUTORIAL), "exec"), {})
        for line in block.splitlines() if language == "bash" else ():
            run_line(at_small_size(line))
        requests += [line for line in block.splitlines() if line.startswith("curl ")]
    assert (tmp_path / "inside.html").exists() and (tmp_path / "runs" / "first" / "report.html").exists()
    assert "transduce serve runs/first" in TUTORIAL.read_text(encoding="utf-8") and len(requests) == 2

    server = Server("runs/first")
    try:
        for line in requests:
            _, address, *fields = shlex.split(line)
            path, data = address.removeprefix("localhost:8080"), "&".join(fields[1::2]).encode()
            status, answer = server.request(path, data, **{"Content-Type": "application/x-www-form-urlencoded"})
            assert status == 200 and ("translations" in answer or "translatedText" in answer), answer
    finally:
        assert server.stop() == 0
