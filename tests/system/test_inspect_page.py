"""The page that shows the inside of a model, in a headless browser: every view is clicked through, live and kept."""

from __future__ import annotations

import json
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import marians
from servers import Server
from system.commands import transduce
from text_runs import BERT, make_run
from transduce.decoding.queue import ExpiredError
from transduce.decoding.translator import Translator
from transduce.evaluation.report import write_report
from transduce.evaluation.result_files import save_attention
from transduce.inspection.arrays import unpack
from transduce.inspection.heads import RULES
from transduce.inspection.look import inspect
from transduce.runs.folder import RunFolder
from transduce.serving.inspection_page import InspectionPage, LookRequest
from transduce.tasks.registry import TASKS

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromedriver") is None, reason="no Chromium with its driver"),
]
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync", "--window-size=1280,1000"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)
# An answer of the server can replace a control at any time, so it is found and used in one call.
USE = """
const control = document.querySelectorAll(`#${arguments[0]} select, #${arguments[0]} button`)[arguments[1]];
if (!control) return false;
if (control.tagName === "SELECT") {
  control.selectedIndex = control.options.length - 1;
  control.dispatchEvent(new Event("change", {bubbles: true}));
} else control.click();
return true;
"""
SECTIONS = ("path", "matrices", "heads", "positions", "steps", "tokens", "layers", "change")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("runs")
    return {
        "transformer": marians.make_run(path / "there", seed=2, decoding={"max_length": 12}),  # each token has controls
        "rnn": make_run(path / "rnn", kind="rnn"),
        "gpt": make_run(path / "gpt", kind="gpt"),
        "bert": make_run(path / "bert", **BERT),
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def wait(condition: Callable[[], Any], seconds: float = 20) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    assert found
    return found


def problems(browser: webdriver.Chrome) -> list[Any]:
    found = [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    return found + [text for text in [text_of(browser, "sections")] if "cannot be drawn" in text]


def text_of(browser: webdriver.Chrome, section: str) -> str:
    return str(browser.execute_script(f"return document.getElementById('{section}').textContent"))


def click_through(browser: webdriver.Chrome) -> None:
    """Use every control of every section once, as far as it is still there when its turn comes."""
    for section in SECTIONS:
        number = 0
        while number < 40 and browser.execute_script(USE, section, number):
            number += 1
        assert not problems(browser), section


def test_the_live_page(runs: dict[str, Path], browser: webdriver.Chrome) -> None:
    server = Server(runs["transformer"], "--inspect")
    try:
        browser.get(server.url + "/inspect")
        box = wait(lambda: browser.find_element(By.ID, "text"))
        wait(box.is_displayed)
        box.clear()
        box.send_keys(marians.LINES[0])
        wait(lambda: text_of(browser, "models").find(f"{marians.LINES[0]} →") >= 0)
        assert not problems(browser)
        for section in SECTIONS:
            drawn = ", ".join(f"#{section} {one}" for one in ("canvas", "svg", "table", "input"))
            assert browser.find_elements(By.CSS_SELECTOR, drawn), section
        browser.execute_script("document.getElementById('tokens').scrollIntoView()")
        wait(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#tokens canvas")) == 2)
        before = text_of(browser, "steps")
        browser.find_element(By.CSS_SELECTOR, "#steps .tree-box").send_keys(Keys.ARROW_RIGHT)
        wait(lambda: text_of(browser, "steps") != before)
        switch = browser.find_element(By.CSS_SELECTOR, "#change input[type=checkbox]")
        browser.execute_script("arguments[0].click()", switch)
        wait(lambda: "riginal" in text_of(browser, "change"))
        click_through(browser)
        for width in (390, 768, 1280):
            browser.set_window_size(width, 1000)
            wait(lambda: browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth"))
    finally:
        browser.get("about:blank")
        server.stop()


def test_requests_of_the_page(runs: dict[str, Path]) -> None:
    server = Server(runs["transformer"], "--inspect")
    asked = {"run": runs["transformer"].name, "text": "a"}
    try:
        status, error = server.request("/inspect/look", asked | {"run": "nobody"})
        assert status == 400 and "allowed are" in error["error"]
        status, error = server.request("/inspect/look", asked | {"text": "a " * 4000})
        assert status == 400 and "at most 256" in error["error"]
        first = server.request("/inspect/look", asked)[1]
        assert "saliency" not in first and first["tokens"] and not any(v["data"] for v in first["parts"][0]["values"])
        assert server.request("/inspect/look", asked | {"views": ["saliency"]})[1].keys() == {"saliency"}
        later = {"views": ["parts"], "values": [first["parts"][0]["name"]]}
        (values, *_) = (part["values"] for part in server.request("/inspect/look", asked | later)[1]["parts"])
        assert all(value["data"] for value in values)
        status, error = server.request("/inspect/look", asked | {"views": ["heads"]})
        assert status == 400 and "allowed are" in error["error"]
        query = {"value": "encoder.blocks.0.self_attention.query", "index": [0, 0, 0]}
        status, cell = server.request("/inspect/cell", asked | query)
        terms = sum(a * b for a, b in cell["terms"])
        assert status == 200 and cell["result"] == pytest.approx(terms * cell["scale"] + (cell["bias"] or 0), abs=1e-4)
        assert server.request("/inspect/cell", asked | {"value": "x", "index": []})[0] == 400
    finally:
        server.stop()


@pytest.mark.parametrize("kind", ["transformer", "rnn", "gpt", "bert"])
def test_a_kept_page_needs_no_network_and_shows_every_view(
    kind: str, runs: dict[str, Path], browser: webdriver.Chrome, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    done = transduce("inspect", runs[kind], marians.LINES[0], "--html", page)
    assert done.code == 0, done.err
    text = page.read_text(encoding="utf-8")
    assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text
    browser.get(page.as_uri())
    wait(lambda: browser.find_element(By.ID, "sections").is_displayed())
    record = json.loads(transduce("inspect", runs[kind], marians.LINES[0], "--json").out)
    for view, reason in record["absent"].items():
        if view in SECTIONS and view != "positions":
            assert reason in text_of(browser, view)
    if record["attention"]:
        shown = browser.find_element(By.CSS_SELECTOR, "#heads .split > figure").text
        assert any(f"“{label}”: {rule}" in shown for label, rule in record["rules"].items())
        browser.execute_script("document.querySelector('[data-key=unit-words]').click()")
        labels = browser.execute_script(LABELS)
        assert labels == record["sides"][record["attention"][-1]["columns"]]["word_texts"]
    click_through(browser)


LABELS = "return [...document.querySelectorAll('#heads .lines text.token:not([role])')].map((one) => one.textContent)"


def test_markup_in_a_sentence_is_text(runs: dict[str, Path], browser: webdriver.Chrome, tmp_path: Path) -> None:
    text = '</script><script>document.title = "on"</script><img src=x onerror="document.title = 2">'
    page = tmp_path / "page.html"
    assert transduce("inspect", runs["transformer"], text, "--target", text, "--html", page).code == 0
    browser.get(page.as_uri())
    wait(lambda: browser.find_element(By.ID, "sections").is_displayed())
    assert text in text_of(browser, "models") and browser.title == "Inside the model" and not problems(browser)
    assert not browser.find_elements(By.TAG_NAME, "img")


SENTENCE = "return document.querySelector('#steps .why').textContent"


def test_a_selected_hypothesis_says_why_it_lost(
    runs: dict[str, Path], browser: webdriver.Chrome, tmp_path: Path
) -> None:
    """Its score and where it left the winner's path, computed again from the values of the search."""
    page, asked = tmp_path / "page.html", ("inspect", runs["transformer"], "a man", "--beam", "4")
    assert transduce(*asked, "--html", page).code == 0
    steps = json.loads(transduce(*asked, "--json").out)["steps"]
    nodes = {node["id"]: node for step in steps["steps"] for node in step["live"]}

    def path_to(id: int | None) -> list[int]:
        return [*path_to(nodes[id]["parent"]), id] if id in nodes else []

    best, *others = steps["results"]
    browser.get(page.as_uri())
    wait(lambda: browser.find_element(By.ID, "sections").is_displayed())
    if others:  # nothing is selected: why the second one lost
        assert f"is number 2 of {len(others) + 1}" in browser.execute_script(SENTENCE)
    pruned = next(node for step in steps["steps"] for node in step["live"][::-1] if node["fate"] == "pruned")
    for id, key in [*((one["id"], "result") for one in others), (pruned["id"], "node")]:
        control = f"document.querySelector('[data-key=\"{key}-{id}\"]')"
        browser.execute_script(f"{control}.dispatchEvent(new Event('click'))")
        said = browser.execute_script(SENTENCE)
        assert browser.execute_script(f"return {control}.getAttribute('aria-pressed')") == "true"
        n = next(n for n, (a, b) in enumerate(zip(path_to(id), path_to(best["id"]), strict=False)) if a != b)
        assert f"left the winner at step {n + 1}, by “{nodes[path_to(id)[n]]['token']}”" in said
        if key == "result":
            score = f"{abs(nodes[id]['log_prob'] / len(path_to(id)) ** steps['length_penalty']):.3g}"
            assert f"= −{score}, that of the winner" in said
        if key == "node":
            assert "was pruned at step" in said and "length penalty plays no part" in said
    assert not problems(browser)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ({"log_prob": -1.0, "fate": "kept"}, "was cut off"),
        ({"log_prob": -1.0, "fate": "finished"}, "the length penalty favours the longer one"),
        ({"log_prob": -9.0, "fate": "finished"}, "By log p alone it would have lost too"),
        (None, "No other hypothesis ended"),
    ],
)
def test_why_the_second_result_lost(
    second: Any, expected: str, runs: dict[str, Path], browser: webdriver.Chrome, tmp_path: Path
) -> None:
    """Of a search that is written into a page."""
    page = tmp_path / "page.html"
    assert transduce("inspect", runs["transformer"], "a man", "--beam", "2", "--html", page).code == 0
    text = page.read_text(encoding="utf-8")
    (data,) = re.findall(r'id="records">(.*?)</script>', text)
    (record,) = json.loads(data)
    first = {"id": 1, "parent": 0, "token": "a", "token_id": 20, "log_prob": -1.5, "fate": "finished", "top": []}
    live = [first] + ([first | {"id": 2, "token": "b"} | second] if second else [])
    results = [{"id": one["id"], "text": one["token"], "log_prob": 0, "length": 1, "score": 0} for one in live]
    record["steps"] |= {"steps": [{"live": live}], "results": results, "beam": 2}
    page.write_text(text.replace(data, json.dumps([record])), encoding="utf-8")
    browser.get(page.as_uri())
    wait(lambda: browser.find_element(By.ID, "sections").is_displayed())
    assert expected in browser.execute_script(SENTENCE) and not problems(browser)


def test_a_cell_is_named_as_the_page_counts(runs: dict[str, Path], browser: webdriver.Chrome, tmp_path: Path) -> None:
    """Head, position and width from 1: the readout and the title of its product name the cell of the array."""
    page, asked = tmp_path / "page.html", ("inspect", runs["transformer"], marians.LINES[0])
    assert transduce(*asked, "--html", page).code == 0
    record = json.loads(transduce(*asked, "--json").out)
    part = next(one for one in record["parts"] if one["kind"] == "self_attention")
    query = next(value for value in part["values"] if value["title"] == "Q")
    browser.get(page.as_uri())
    wait(lambda: browser.find_element(By.ID, "sections").is_displayed())
    cells = browser.find_element(By.CSS_SELECTOR, f"[data-key='value-{query['name']}']")
    cells.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, *[Keys.ARROW_RIGHT] * 2, Keys.ENTER)
    token, value = record["sides"]["src"]["tokens"][2], f"{unpack(query['data'])[0, 2, 2]:#.3g}".replace("-", "−")
    place = f"position 3 “{token}”, width 3"
    assert browser.find_element(By.CSS_SELECTOR, "#matrices .detail h3").text == f"Q, head 1, {place} = {value}"
    shown = browser.execute_script("return arguments[0].closest('figure').querySelector('output').textContent", cells)
    assert shown == f"{place}: {value}"
    assert "sum of" in browser.find_element(By.CSS_SELECTOR, "#matrices .detail").text  # its operands are in the page


def test_the_heads_of_a_report_are_those_of_the_page(
    runs: dict[str, Path], browser: webdriver.Chrome, tmp_path: Path
) -> None:
    """A map for each head of each sentence; a click enlarges one, with the same label for all sentences."""
    run = tmp_path / "run"
    shutil.copytree(runs["transformer"], run)
    translator, folder = Translator.load(run), RunFolder.open(run)
    found = [inspect(translator, line) for line in ("a man </script>", "two women")]
    save_attention(folder, found)
    write_report(folder, TASKS["translation"].wording)
    browser.get((run / "report.html").as_uri())
    layers = found[0].recorded["attention"]
    maps = wait(lambda: browser.find_elements(By.CSS_SELECTOR, "#attention ~ .heads .small-map"))
    assert len(maps) == 2 * sum(len(layer["labels"]) for layer in layers)
    last = layers[-1]
    browser.execute_script(f"document.querySelector('[data-key=\"map-{last['name']}-0\"]').click()")
    for one, shown in zip(found, browser.find_elements(By.CSS_SELECTOR, ".heads .split > figure"), strict=True):
        label = one.recorded["attention"][-1]["labels"][0]["label"]
        assert f"“{label}”: {RULES[label]}" in shown.text
    assert not browser.get_log("browser")


REQUESTS = "return performance.getEntriesByType('resource').filter((one) => one.name.endsWith('/look')).length"

COMPARE = """
const box = document.getElementById("other");
box.selectedIndex = 2;
box.dispatchEvent(new Event("change"));
"""
HAVE_VALUES = """
const panels = [...document.querySelectorAll("#matrices .panel")];
return panels.length === 2 && panels.every((one) => one.querySelector("canvas"));
"""


@pytest.fixture
def comparison(runs: dict[str, Path], browser: webdriver.Chrome) -> Iterator[webdriver.Chrome]:
    """The live page of two runs whose default parts differ."""
    server = Server(runs["transformer"], runs["rnn"], "--inspect")
    try:
        browser.get(server.url + "/inspect/")
        wait(lambda: browser.find_elements(By.CSS_SELECTOR, "[data-key=other]"))
        browser.execute_script(COMPARE)
        browser.find_element(By.ID, "text").send_keys(marians.LINES[0])
        wait(lambda: text_of(browser, "models").count(marians.LINES[0]) == 2)
        wait(lambda: browser.execute_script(HAVE_VALUES))
        yield browser
    finally:
        browser.get("about:blank")
        server.stop()


def test_the_live_comparison_asks_once_for_the_parts_of_both_models(comparison: webdriver.Chrome) -> None:
    browser = comparison
    wait(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#tokens canvas")) == 4)  # asked for when nobody types
    before = browser.execute_script(REQUESTS)
    time.sleep(1)
    assert browser.execute_script(REQUESTS) == before
    assert len(panels(browser, "matrices")) == 2 and not problems(browser)


def test_each_model_of_a_comparison_has_its_own_forced_tokens_and_parts_that_are_off(
    comparison: webdriver.Chrome,
) -> None:
    browser = comparison
    for section in ("#change input[type=checkbox]", "#steps .candidate"):
        browser.execute_script(f"document.querySelectorAll('{section}')[1].click()")
    wait(lambda: "Forced tokens" in text_of(browser, "steps") and "Switched off" in text_of(browser, "change"))
    first, second = panels(browser, "steps")
    assert "Forced tokens" in first.text and "Forced tokens" not in second.text
    assert "Nothing is switched off" in panels(browser, "change")[1].text


def panels(browser: webdriver.Chrome, section: str) -> list[Any]:
    return browser.find_elements(By.CSS_SELECTOR, f"#{section} .panel")


def test_the_last_of_two_cells_is_shown(comparison: webdriver.Chrome) -> None:
    """The answer for the first cell arrives after that for the second one."""
    shown = comparison.execute_async_script("""
        const [done, ask] = [arguments[0], window.fetch];
        let n = 0;
        window.fetch = async (...request) => {
          const answer = await ask(...request);
          if (request[0] === "/inspect/cell" && n++ === 0) await new Promise((end) => setTimeout(end, 600));
          return answer;
        };
        const cells = document.querySelectorAll("#matrices .panel .cells")[1];
        for (const key of ["Enter", "ArrowRight", "Enter"])
          cells.dispatchEvent(new KeyboardEvent("keydown", { key }));
        setTimeout(() => done(document.querySelector("#matrices .detail").textContent), 1500);
    """)
    result = shown.rpartition("= ")[2]
    assert shown.count("sum of") == 1 and f"= {result}" in shown.partition("sum of")[0]


def test_a_request_that_was_given_up_stops_and_other_threads_keep_their_number(runs: dict[str, Path]) -> None:
    before, numbers = torch.get_num_threads(), list[int]()
    torch.set_num_threads(2)
    page, given_up = InspectionPage(runs), threading.Event()
    thread = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert numbers == [2] and page._worker.submit(torch.get_num_threads).result() == 1
    asked = LookRequest(run="bert", text="a man", off=[])
    assert page._look(asked, given_up) is page._look(asked, threading.Event())
    given_up.set()
    with pytest.raises(ExpiredError):
        page._look(LookRequest(run="bert", text="two women"), given_up)
    page.close()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--html", "x.html", "--json"], ["--html, --json", "without TEXT"]),
        (["--src", "x"], ["--src", "without --ablate-heads"]),
        (["a man", "--port", "8080"], ["--port", "with TEXT"]),
        (["a man", "--ablate-heads", "x"], ["TEXT", "with --ablate-heads"]),
    ],
)
def test_options_that_do_not_apply_are_refused(arguments: list[str], named: list[str], runs: dict[str, Path]) -> None:
    done = transduce("inspect", runs["transformer"], *arguments)
    assert done.code == 2 and done.err.count("\n") == 1 and all(one in done.err for one in named)


def test_two_models_in_a_terminal_are_named(runs: dict[str, Path]) -> None:
    both = [runs["transformer"], runs["rnn"]]
    asked = ("inspect", both[0], "a man", "--compare", both[1])
    titles = [f"{run}:" for run in both]
    assert [line for line in transduce(*asked).out.splitlines() if line in titles] == titles
    assert len([json.loads(line) for line in transduce(*asked, "--json").out.splitlines()]) == 2


def test_a_refused_picture_leaves_no_page(runs: dict[str, Path], tmp_path: Path) -> None:
    done = transduce("inspect", runs["transformer"], "a", "--html", tmp_path / "x.html", "--svg", tmp_path / "x.bmp")
    assert done.code == 2 and "use .svg or .png" in done.err and not list(tmp_path.iterdir())


def test_a_reload_replaces_the_models_of_the_page(runs: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["transformer"], run)
    server = Server(run, "--inspect")
    try:
        before = server.request("/inspect/look", {"run": "run", "text": "a man"})[1]
        shutil.rmtree(run)
        marians.make_run(run, seed=5)
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_log("new model in service")
        assert server.request("/inspect/look", {"run": "run", "text": "a man"})[1]["tokens"] != before["tokens"]
    finally:
        server.stop()


def test_two_models_side_by_side(runs: dict[str, Path], browser: webdriver.Chrome, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = transduce("inspect", runs["transformer"], marians.LINES[0], "--compare", runs["rnn"], "--html", page)
    assert done.code == 0, done.err
    browser.get(page.as_uri())
    wait(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#tokens .panel")) == 2)
    assert not problems(browser)
