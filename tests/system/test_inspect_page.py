"""The page that shows the inside of a model, in a headless browser: every view is clicked through, live and kept."""

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
import torch
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import marians
from servers import Server
from system.browsers import MARKS, Browser, logged_problems, wait
from system.commands import succeed, transduce
from text_runs import BERT, make_run
from transduce.data.preparation import ScoredSet
from transduce.decoding.queue import ExpiredError
from transduce.decoding.translator import Translator
from transduce.evaluation.report import write_report
from transduce.evaluation.run_record import save_set
from transduce.inspection.analyses import RULES
from transduce.inspection.inspection import Inspection, inspect, kept_page
from transduce.inspection.page import PAGE
from transduce.inspection.recorded_modules import unpack
from transduce.pipeline import save_attention
from transduce.runs.folder import RunFolder
from transduce.serving.inspection_page import InspectionPage, LookRequest
from transduce.tasks.translation import _sentences_to_draw

pytestmark = MARKS
Runs = dict[str, Path]
WritePage = Callable[..., Path]
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
SET = """
const control = document.querySelector(arguments[0]);
const isSelect = control.tagName === "SELECT";
control[isSelect ? "selectedIndex" : "value"] = arguments[1];
control.dispatchEvent(new Event(isSelect ? "change" : "input"));
"""
SECTIONS = ("matrices", "heads", "positions", "tokens", "layers", "change")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    path = tmp_path_factory.mktemp("runs")
    return {
        "transformer": marians.make_run(path / "there", seed=2, decoding={"max_length": 12}),  # each token has controls
        "pre-norm": marians.make_run(path / "pre", seed=2, decoding={"max_length": 12}, residual="pre"),
        "rnn": make_run(path / "rnn", kind="rnn"),
        "gpt": make_run(path / "gpt", kind="gpt"),
        "bert": make_run(path / "bert", **BERT),
    }


@pytest.fixture(scope="module")
def live(runs: Runs, browser: Browser) -> Iterator[Server]:
    """A server of two runs whose default parts differ; the page opens with the first one."""
    server = Server(runs["transformer"], runs["rnn"], "--inspect")
    yield server
    browser.get("about:blank")
    server.stop()


@pytest.fixture(scope="module")
def seen(runs: Runs) -> Inspection:
    """What the page of the first sentence shows."""
    return inspect(runs["transformer"], marians.LINES[0])


@pytest.fixture(scope="module")
def page(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the first sentence, by `transduce inspect RUN TEXT`."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    succeed("inspect", runs["transformer"], marians.LINES[0], "--html", path)
    return path


@pytest.fixture
def write_page(tmp_path: Path) -> WritePage:
    """Write a page by `transduce inspect RUN TEXT ...`."""

    def write(*arguments: object) -> Path:
        page = tmp_path / "page.html"
        succeed("inspect", *arguments, "--html", page)
        return page

    return write


def problems(browser: Browser) -> list[Any]:
    return logged_problems(browser) + [text for text in [text_of(browser, "sections")] if "cannot be drawn" in text]


def text_of(browser: Browser, section: str) -> str:
    return str(browser.execute_script(f"return document.getElementById('{section}').textContent"))


def open_kept(browser: Browser, page: Path, link: str = "all") -> None:
    """Open all values and wait for the sections below the first screen, which are drawn after it was painted."""
    browser.get("about:blank")
    browser.get(f"{page.as_uri()}#{link}")
    filled = "return [...document.querySelectorAll('.panels')].every((box) => box.firstChild)"
    wait(lambda: browser.execute_script(filled))


def set_control(browser: Browser, selector: str, value: int) -> None:
    """Move a slider to a value, or select an option by its index."""
    browser.execute_script(SET, selector, value)


def open_live(browser: Browser, live: Server, link: str) -> None:
    browser.get("about:blank")  # otherwise only the fragment changes, and the page stays
    browser.get(f"{live.url}/inspect/#{link}")


def click_through(browser: Browser) -> None:
    """Use every control of every section once, as far as it is still there when its turn comes."""
    for section in SECTIONS:
        number = 0
        while number < 40 and browser.execute_script(USE, section, number):
            number += 1
        assert not problems(browser), section


def test_the_live_page(live: Server, browser: Browser) -> None:
    open_live(browser, live, "all")
    box = wait(lambda: browser.find_element(By.ID, "text"))
    wait(box.is_displayed)
    box.clear()
    box.send_keys(marians.LINES[0])
    wait(lambda: text_of(browser, "models").find(f"{marians.LINES[0]} →") >= 0)
    wait(lambda: browser.find_elements(By.CSS_SELECTOR, "#matrices canvas"))  # its values may be in a later answer
    assert not problems(browser)
    for section in SECTIONS:
        drawn = ", ".join(f"#{section} {one}" for one in ("canvas", "svg", "table", "input"))
        assert browser.find_elements(By.CSS_SELECTOR, drawn), section
    browser.execute_script("document.getElementById('tokens').scrollIntoView()")
    wait(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#tokens canvas")) == 2)
    switch = browser.find_element(By.CSS_SELECTOR, "#change input[type=checkbox]")
    browser.execute_script("arguments[0].click()", switch)
    wait(lambda: "riginal" in text_of(browser, "change"))
    click_through(browser)
    for width in (390, 768, 1280):
        browser.set_window_size(width, 1000)
        wait(lambda: browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth"))


def test_requests_of_the_page(live: Server, runs: Runs) -> None:
    asked = {"run": runs["transformer"].name, "text": "a"}
    for wrong, message in (
        ({"run": "nobody"}, f"allowed: {asked['run']}"),
        ({"text": "a " * 4000}, "at most 256"),
        ({"views": ["heads"]}, "allowed are"),
        ({"beam": 9}, "beam"),
    ):
        status, error = live.request("/inspect/look", asked | wrong)
        assert status == 400 and message in error["error"]
    first = live.request("/inspect/look", asked)[1]
    assert "saliency" not in first and first["tokens"] and not any(v["data"] for v in first["parts"][0]["values"])
    assert live.request("/inspect/look", asked | {"views": ["saliency"]})[1].keys() == {"saliency"}
    later = {"views": ["parts"], "values": [first["parts"][0]["name"]]}
    (values, *_) = (part["values"] for part in live.request("/inspect/look", asked | later)[1]["parts"])
    assert all(value["data"] for value in values)
    query = {"value": "encoder.blocks.0.self_attention.query", "index": [0, 0, 0]}
    status, cell = live.request("/inspect/cell", asked | query)
    terms = sum(a * b for a, b in cell["terms"])
    assert status == 200 and cell["result"] == pytest.approx(terms * cell["scale"] + (cell["bias"] or 0), abs=1e-4)
    # All matrices of a base model take hundreds of megabytes; the page shows a part and its residual connection.
    names = [f"encoder.blocks.0.{name}" for name in ("self_attention", "self_attention_residual", "feed_forward")]
    status, error = live.request("/inspect/look", asked | {"views": ["parts"], "values": names})
    assert status == 400 and "values" in error["error"]
    assert live.request("/inspect/models")[1][0]["examples"] == []  # a service shows nobody the texts of a run
    assert live.request("/inspect/cell", asked | {"value": "x", "index": []})[0] == 400


def test_the_first_line_of_inspect_is_the_address_of_a_page_that_offers_examples(
    runs: Runs, browser: Browser, tmp_path: Path
) -> None:
    """It opens with that of medium length; a click shows another. The address without a path leads there too."""
    run = tmp_path / "run"
    shutil.copytree(runs["transformer"], run)
    sources = ("a man", marians.LINES[0], f"{marians.LINES[0]} {marians.LINES[1]}")
    samples = [{"src": src, "ref": "", "hyp": ""} for src in sources]
    save_set(RunFolder.open(run), "samples", "valid", {"update": 1, "samples": samples})
    command = [sys.executable, "-m", "transduce", "inspect", str(run), "--no-browser"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = re.fullmatch(r"look inside: (http://127\.0\.0\.1:\d+/)inspect/\n", process.stderr.readline())
            with urllib.request.urlopen(address[1]) as response:
                assert response.url == f"{address[1]}inspect/" and b"Inside the model" in response.read()
            browser.get(address[1])
            wait(lambda: f"{marians.LINES[0]} →" in text_of(browser, "models"))
            assert browser.execute_script("return document.getElementById('text').value") == marians.LINES[0]
            offered = browser.find_elements(By.CSS_SELECTOR, "#examples button")
            assert [one.text for one in offered] == list(sources)
            offered[0].click()
            wait(lambda: browser.execute_script("return document.getElementById('text').value") == sources[0])
            wait(lambda: f"{sources[0]} →" in text_of(browser, "models"))
            assert browser.execute_script("return document.fonts.check('12px \"Source Sans 3\"')")
            assert not problems(browser)
        finally:
            browser.get("about:blank")
            process.send_signal(signal.SIGTERM)


def shown_number(text: str) -> float:
    return float(text.replace("−", "-").removeprefix("< ").removesuffix(" %"))


def open_stage(browser: Browser, page: Path, link: str) -> None:
    browser.get("about:blank")
    browser.get(f"{page.as_uri()}#{link}")
    wait(lambda: browser.find_elements(By.CSS_SELECTOR, "#number .near, #number .code"))


def test_the_stage_shows_a_query_on_its_way_through_a_head(seen: Inspection, browser: Browser, page: Path) -> None:
    """Scores, e^s with its sum, and weights are the recorded ones; the number names its terms and its line of code."""
    values, part = seen, "decoder.blocks.0.cross_attention"
    scores = values[f"{part}.scores"].array[1, 2].astype(float)
    open_stage(browser, page, "part=dec.1.cross&head=2&q=3")
    for column, expected in (
        ("score", scores),
        ("power", np.exp(scores)),
        ("share", 100 * values[f"{part}.weights"].array[1, 2]),
    ):
        cells = browser.find_elements(By.CSS_SELECTOR, f"#centre .row:not(.sum) .cell.{column}")
        shown = [shown_number(cell.text) for cell in cells]
        np.testing.assert_allclose(shown, expected, rtol=1e-2, atol=0.051)
    total = browser.find_element(By.CSS_SELECTOR, "#centre .sum .power").text
    assert shown_number(total) == pytest.approx(np.exp(scores).sum(), rel=1e-2)
    strip = browser.find_element(By.CSS_SELECTOR, f"[data-value='{part}.query']")
    strip.send_keys(*[Keys.ARROW_RIGHT] * 3)
    expected = values[f"{part}.query"].array[1, 2, 2]
    assert shown_number(browser.find_element(By.CSS_SELECTOR, "#number .big").text) == pytest.approx(expected, rel=5e-3)
    terms = browser.find_elements(By.CSS_SELECTOR, "#number .term")
    assert len(terms) == 9 and f"{values[f'{part}.input'].shape[-1] - 8} more = " in terms[-1].text
    assert "self.query(x)" in browser.find_element(By.CSS_SELECTOR, "#number mark").text
    assert browser.execute_script("return document.activeElement.dataset.value") == f"{part}.query"
    sources = browser.find_elements(By.CSS_SELECTOR, "#centre .strip.source")
    assert [one.get_attribute("data-value") for one in sources] == [f"{part}.input"]
    link = browser.execute_script("return location.hash")
    assert f"cell={part}.query:2:3:3" in link and "part=dec.1.cross&head=2&q=3" in link
    browser.refresh()
    wait(lambda: browser.find_elements(By.CSS_SELECTOR, "#number .near"))
    assert browser.execute_script("return location.hash") == link and len(terms) == 9
    assert not logged_problems(browser)


@pytest.mark.parametrize("kind", ["transformer", "pre-norm", "rnn", "gpt", "bert", "star", "convs2s", "transformer-xl"])
def test_the_stage_shows_every_part_of_every_architecture(
    kind: str, runs: Runs, browser: Browser, tmp_path: Path
) -> None:
    run = runs.get(kind) or make_run(tmp_path / kind, kind=kind)
    page, found = tmp_path / "page.html", inspect(run, "the cat sat")
    page.write_text(kept_page([found]), encoding="utf-8")
    open_stage(browser, page, "")
    parts = browser.execute_script("return [...document.querySelectorAll('#map .name')].map((box) => box.dataset.key)")
    assert len(parts) == len(found.parts)
    for name in parts:
        browser.execute_script(f"document.querySelector('[data-key=\"{name}\"]').click()")
        assert browser.find_elements(By.CSS_SELECTOR, "#centre .strip"), name
        assert browser.find_element(By.CSS_SELECTOR, "#number .big").text, name
        for width in (390, 1280) if name == parts[-1] else ():
            browser.set_window_size(width, 1000)
            assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert not logged_problems(browser)


def test_a_phone_shows_the_chosen_number_at_the_bottom(browser: Browser, page: Path) -> None:
    """The panel of the number is screens below; a tap leads there. The map, opened and closed, covers the stage."""
    browser.set_window_size(390, 844)
    try:
        open_stage(browser, page, "part=enc.1.self&q=3")
        browser.find_element(By.CSS_SELECTOR, "#centre .strip.q").send_keys(Keys.ARROW_RIGHT)
        big = browser.find_element(By.CSS_SELECTOR, "#number .big")
        readout = browser.find_element(By.ID, "readout")
        assert readout.text.startswith(f"{big.text}: Q, head 1, position 3 ") and not is_in_view(browser, big)
        assert is_in_view(browser, readout)
        readout.click()
        wait(lambda: is_in_view(browser, big))
        browser.execute_script("document.querySelector('#modes .map-switch').click()")
        close = browser.find_element(By.CSS_SELECTOR, "#map .map-switch")
        assert is_in_view(browser, close)
        close.click()
        assert not close.is_displayed() and not logged_problems(browser)
    finally:
        browser.set_window_size(1280, 1000)


def test_a_matrix_opens_where_the_stage_is_scrolled_to(browser: Browser, page: Path) -> None:
    """The row of the chosen position is marked in it."""
    open_stage(browser, page, "part=enc.1.self&q=3")
    browser.set_window_size(1280, 500)
    try:
        browser.execute_script("document.querySelector('#centre').scrollTop = 1e4")
        browser.execute_script("document.querySelector('#band-residual .opener').click()")
        assert is_in_view(browser, browser.find_element(By.CSS_SELECTOR, ".whole .close"))
        browser.find_element(By.CSS_SELECTOR, ".whole .cells").send_keys(Keys.ENTER)
        assert "position 3 " in browser.find_element(By.CSS_SELECTOR, "#number .place").text
    finally:
        browser.set_window_size(1280, 1000)


def test_the_lines_of_the_map_follow_its_size(browser: Browser, page: Path) -> None:
    """Their arrows end at the boxes of cross-attention, also after the page above the map has become higher."""
    open_stage(browser, page, "")
    wait(lambda: browser.execute_script(GAPS) == 0)
    browser.execute_script("document.querySelector('#map').style.width = '180px'")
    wait(lambda: browser.execute_script(GAPS) == 0)
    assert browser.execute_script("return document.querySelectorAll('#map .memory-lines').length") == 1


GAPS = """
const places = (name) => [...document.querySelectorAll(`#map ${name}`)].map((one) => one.getBoundingClientRect());
const [ends, boxes] = [places(".memory-lines path").slice(1), places(".cross_attention")];
if (!ends.length) return null; // not drawn yet
return ends.filter((end, i) => Math.abs(end.right + 1 - boxes[i].left) > 2).length;
"""


def is_in_view(browser: Browser, element: Any) -> bool:
    """Whether nothing covers the middle of an element, and the window shows it."""
    return bool(browser.execute_script(IN_VIEW, element))


IN_VIEW = """
const { x, y, width, height } = arguments[0].getBoundingClientRect();
return arguments[0].contains(document.elementFromPoint(x + width / 2, y + height / 2));
"""


def test_positions_on_the_stage_are_chosen_and_opened(seen: Inspection, browser: Browser, page: Path) -> None:
    open_stage(browser, page, "part=src_embedding")
    browser.find_element(By.CSS_SELECTOR, "[data-value='position']").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert "cell=position" in browser.current_url
    table = unpack(seen.views["positions"][0]["table"])
    shown = shown_number(browser.find_element(By.CSS_SELECTOR, "#number .big").text)
    assert shown == pytest.approx(table[0, 1], rel=5e-3, abs=1e-3)
    browser.find_element(By.CSS_SELECTOR, "[data-value='src_embedding']").send_keys(Keys.ARROW_RIGHT)
    *terms, result = re.findall(r"−?[\d.]+(?=$| )", browser.find_element(By.CSS_SELECTOR, "#number .formula b").text)
    expected = seen["src_embedding"].array[0, 0]
    assert shown_number(result) == pytest.approx(expected, rel=1e-2, abs=1e-3)
    assert sum(map(shown_number, terms)) == pytest.approx(expected, abs=2e-2) and len(terms) == 2
    browser.execute_script("document.querySelector('[data-key=open-position]').click()")
    assert browser.find_element(By.CSS_SELECTOR, ".whole").get_attribute("aria-label") == "position"
    assert not logged_problems(browser)


def test_a_click_on_another_token_forces_it_beside_the_first_output(live: Server, browser: Browser) -> None:
    open_live(browser, live, urlencode({"s": marians.LINES[0], "part": "dec.1.self", "head": 2}))
    wait(lambda: browser.find_elements(By.CSS_SELECTOR, "#centre .weight"))  # W_Q of the head was asked for
    before = browser.execute_script(OUTPUT)
    token = browser.execute_script(FORCE)
    wait(lambda: browser.find_elements(By.CSS_SELECTOR, "#output .column.other"))
    (forced, was), *_ = browser.execute_script(OUTPUT)
    assert (forced, was) == (f"{token} ◂", before[0][0])
    assert not logged_problems(browser)


@pytest.mark.parametrize(("kind", "n_stops"), [("transformer", 11), ("rnn", 3), ("gpt", 9), ("bert", 8)])
def test_the_tour_asks_before_it_shows(kind: str, n_stops: int, runs: Runs, browser: Browser, tmp_path: Path) -> None:
    """Each answer is right or not by the values of this sentence, in two languages."""
    page, texts = tmp_path / "page.html", json.loads((PAGE / "tour.de.json").read_text(encoding="utf-8"))
    page.write_text(kept_page([inspect(runs[kind], marians.LINES[0])]), encoding="utf-8")
    open_stage(browser, page, "mode=tour&lang=en")
    browser.execute_script("document.querySelector('[data-key=language-de]').click()")
    titles = []
    while True:
        titles.append(browser.find_element(By.CSS_SELECTOR, "#lesson h2").text)
        answers = len(browser.find_elements(By.CSS_SELECTOR, "#lesson .answer-button"))
        hides = browser.execute_script("return document.body.dataset.hides")
        shares = browser.find_elements(By.CSS_SELECTOR, "#centre .share-bar")
        assert not (hides == "shares" and shares[0].is_displayed())
        if answers:
            browser.execute_script("document.querySelector('#lesson .answer-button').click()")
            right = browser.find_elements(By.CSS_SELECTOR, "#lesson .answer-button.right")
            verdict = browser.find_element(By.CSS_SELECTOR, "#lesson .answer b").text
            assert len(right) == 1 and answers > 1
            is_first = right[0].get_attribute("data-key") == "answer-0"
            assert verdict == texts["right" if is_first else "wrong"]
            assert "…" not in browser.find_element(By.CSS_SELECTOR, "#lesson .answer").text.replace("...", "")
        if not browser.execute_script(NEXT, texts["next"]):
            break
    expected = [stop["title"] for stop in texts["stops"].values()]
    assert len(titles) == n_stops and titles == [title for title in expected if title in titles]
    assert not logged_problems(browser)


NEXT = """
const next = document.querySelector(`[data-key="stop-${arguments[0]}"]`);
if (next.disabled) return false;
next.click();
return true;
"""


def test_a_query_of_the_tour_and_a_trial_of_its_scores(seen: Inspection, browser: Browser, page: Path) -> None:
    """The right key has the largest weight; after a score is raised by 2, the weights are the softmax of the others."""
    found, part = seen, "encoder.blocks.0.self_attention"
    scores = found[f"{part}.scores"].array[0]
    query = len(scores) // 2
    open_stage(browser, page, "mode=tour&stop=3&lang=en")
    browser.execute_script("document.querySelector('#lesson .answer-button').click()")
    right = browser.find_element(By.CSS_SELECTOR, "#lesson .answer-button.right").text.removesuffix(" ✓")
    assert right == found.sentence.sides["src"].tokens[found[f"{part}.weights"].array[0, query].argmax()]
    open_stage(browser, page, "mode=tour&stop=4&lang=en")
    browser.execute_script("document.querySelector('#lesson .answer-button').click()")
    set_control(browser, "[data-key=drag]", 2)
    raised = scores[query].astype(float)
    raised[np.argsort(raised)[-2]] += 2
    shown = [shown_number(cell.text) for cell in browser.find_elements(By.CSS_SELECTOR, "#centre .cell.share")]
    expected = 100 * np.exp(raised - raised.max()) / np.exp(raised - raised.max()).sum()
    np.testing.assert_allclose(shown[:-1], expected, rtol=1e-2, atol=0.11)
    assert not logged_problems(browser)


def test_the_lab_changes_the_beam_and_shows_the_output_without_parts(
    live: Server, seen: Inspection, browser: Browser
) -> None:
    open_live(browser, live, urlencode({"s": marians.LINES[0], "mode": "lab"}))
    wait(lambda: browser.find_elements(By.CSS_SELECTOR, "#lesson .without li"))
    expected = seen.views["without"]
    shown = browser.find_elements(By.CSS_SELECTOR, "#lesson .without .text")
    complete = {"text": seen.sentence.sides["tgt_out"].text}
    assert [one.get_attribute("title") for one in shown] == [one["text"] for one in [complete, *expected]]
    set_control(browser, "[data-key=lab-beam]", 3)
    wait(lambda: "Beam of 3" in text_of(browser, "output"))
    wait(lambda: browser.execute_script(SWITCH_OFF))
    wait(lambda: "Switched off" in text_of(browser, "models"))
    assert not logged_problems(browser)


SWITCH_OFF = """
const button = document.querySelectorAll("#lesson .without button")[1];
button?.click();
return button !== undefined;
"""
FORCE = """
const choice = document.querySelector("#output .choice[aria-pressed=false]");
choice.click();
return choice.firstChild.textContent;
"""
OUTPUT = """
return [...document.querySelectorAll("#output .column")].map((column) =>
  [".token", ".before"].map((name) => column.querySelector(name)?.textContent));
"""

NAMES = "return [...document.querySelectorAll('#map .box > .name')].map((name) => name.textContent)"
ENCODER_BLOCKS = {
    "transformer": ["self-attention", "+ norm", "feed-forward", "+ norm"],
    "pre-norm": ["norm", "self-attention", "+", "norm", "feed-forward", "+"],
}


@pytest.mark.parametrize("run", ENCODER_BLOCKS)
def test_the_map_has_norms_where_the_model_has_them(
    run: str, runs: Runs, browser: Browser, write_page: WritePage
) -> None:
    page, block = write_page(runs[run], "a man"), ENCODER_BLOCKS[run]
    open_stage(browser, page, "part=encoder.blocks.0.feed_forward_residual")
    shown = browser.execute_script(NAMES)
    last = ["norm"] if run == "pre-norm" else []
    assert shown[: shown.index("embedding", 1)] == ["embedding", *block, *block, *last]
    assert shown[-1 - len(last) :] == [*last, "linear, softmax"]
    equation = {"transformer": "LayerNorm(x + Sublayer(x))", "pre-norm": "x + Sublayer(LayerNorm(x))"}
    assert equation[run] in text_of(browser, "centre")
    open_kept(browser, page)
    read = "norm(x)" if last else "x"
    assert f"softmax({read} Eᵀ)" in text_of(browser, "layers") and not problems(browser)


@pytest.mark.parametrize("point", ["decoder.blocks.0.cross_attention.weights", "logits.probabilities"])
def test_a_click_on_a_weight_shows_its_softmax(point: str, runs: Runs, browser: Browser, write_page: WritePage) -> None:
    """On the page that a click on the head opened, and with the sum over outputs that are not shown."""
    page = write_page(runs["transformer"], "a man")
    array = inspect(runs["transformer"], "a man")[point].array
    open_kept(browser, page)
    if "attention" in point:
        part, array = point.removesuffix(".weights"), array[1]
        browser.execute_script(f"document.querySelector('[data-key=\"map-{part}-1\"]').click()")
    else:
        open_kept(browser, page, "mode=all&part=logits")
    cells = browser.find_element(By.CSS_SELECTOR, f"[data-key='value-{point}']")
    cells.send_keys(Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ENTER)
    title, *lines = browser.find_element(By.CSS_SELECTOR, "#matrices .detail").text.split("\n")
    (result,) = (line for line in lines if line.startswith("sum over all"))
    assert float(title.rpartition("= ")[2]) == pytest.approx(array[1, 2], rel=5e-3)
    assert float(result.rpartition("= ")[2]) == pytest.approx(array[1, 2], rel=2e-2)
    assert sum("exp(" in line for line in lines) == array.shape[1] + 1 and ("head 2" in title) == ("attention" in point)
    assert not problems(browser)


@pytest.mark.parametrize("kind", ["transformer", "rnn", "gpt", "bert"])
def test_a_kept_page_needs_no_network_and_shows_every_view(
    kind: str, runs: Runs, browser: Browser, write_page: WritePage
) -> None:
    page = write_page(runs[kind], marians.LINES[0])
    text = page.read_text(encoding="utf-8")
    assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text
    open_kept(browser, page)
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


def test_markup_in_a_sentence_is_text(runs: Runs, browser: Browser, write_page: WritePage) -> None:
    text = '</script><script>document.title = "on"</script><img src=x onerror="document.title = 2">'
    open_kept(browser, write_page(runs["transformer"], text, "--target", text))
    assert text in text_of(browser, "models") and browser.title == "Inside the model" and not problems(browser)
    assert not browser.find_elements(By.TAG_NAME, "img")


SENTENCE = "return document.querySelector('#output .why').textContent"


def test_a_selected_hypothesis_says_why_it_lost(runs: Runs, browser: Browser, write_page: WritePage) -> None:
    """Its score and where it left the winner's path, computed again from the values of the search."""
    asked = (runs["transformer"], "a man", "--beam", "4")
    steps = json.loads(transduce("inspect", *asked, "--json").out)["steps"]
    nodes = {node["id"]: node for step in steps["steps"] for node in step["live"]}

    def path_to(id: int | None) -> list[int]:
        return [*path_to(nodes[id]["parent"]), id] if id in nodes else []

    best, *others = steps["results"]
    open_stage(browser, write_page(*asked), "step=1")
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
        if key == "result":  # and the tree shows where
            assert f"step={n + 1}" in browser.current_url
            score = f"{abs(nodes[id]['log_prob'] / len(path_to(id)) ** steps['length_penalty']):.3g}"
            assert f"= −{score}, that of the winner" in said
        if key == "node":
            assert "was pruned at step" in said and "length penalty plays no part" in said
    assert not problems(browser)


def test_a_cell_is_named_as_the_page_counts(runs: Runs, browser: Browser, page: Path) -> None:
    """Head, position and width from 1: the readout and the title of its product name the cell of the array."""
    record = json.loads(transduce("inspect", runs["transformer"], marians.LINES[0], "--json").out)
    part = next(one for one in record["parts"] if one["kind"] == "self_attention")
    query = next(value for value in part["values"] if value["title"] == "Q")
    open_kept(browser, page, "mode=all&part=enc.1.self")
    cells = browser.find_element(By.CSS_SELECTOR, f"[data-key='value-{query['name']}']")
    cells.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, *[Keys.ARROW_RIGHT] * 2, Keys.ENTER)
    token, value = record["sides"]["src"]["tokens"][2], f"{unpack(query['data'])[0, 2, 2]:#.3g}".replace("-", "−")
    place = f"position 3 “{token}”, width 3"
    assert browser.find_element(By.CSS_SELECTOR, "#matrices .detail h3").text == f"Q, head 1, {place} = {value}"
    shown = browser.execute_script("return arguments[0].closest('figure').querySelector('output').textContent", cells)
    assert shown == f"{place}: {value}"
    assert "sum of" in browser.find_element(By.CSS_SELECTOR, "#matrices .detail").text  # its operands are in the page


def test_the_heads_of_a_report_are_those_of_the_page(runs: Runs, browser: Browser, tmp_path: Path) -> None:
    """A map for each head of the chosen sentence; a click enlarges one, with the same label for all sentences."""
    run = tmp_path / "run"
    shutil.copytree(runs["transformer"], run)
    translator, folder = Translator.load(run), RunFolder.open(run)
    lines = ["a man </script>", "two women"]
    found = [inspect(translator, line) for line in lines]
    held_out = ScoredSet("test", ("en", "de"), [(line, "") for line in lines])
    save_attention(folder, _sentences_to_draw([held_out]))
    (run / "data.json").write_text(json.dumps({"fingerprint": "0" * 64}), encoding="utf-8")
    write_report(folder)
    browser.get((run / "report.html").as_uri())
    layers = found[0].recorded["attention"]
    maps = wait(lambda: browser.find_elements(By.CSS_SELECTOR, ".heads .small-map"))
    assert len(maps) == sum(len(layer["labels"]) for layer in layers)
    last = layers[-1]
    browser.execute_script(f"document.querySelector('[data-key=\"map-{last['name']}-0\"]').click()")
    picker = browser.find_element(By.ID, "sentence")
    assert picker.text.split("\n") == lines
    for number, one in enumerate(found):
        set_control(browser, "#sentence", number)
        assert browser.find_element(By.ID, "translation").text == one.recorded["sides"]["tgt_out"]["text"].strip()
        (shown,) = browser.find_elements(By.CSS_SELECTOR, ".heads .split > figure")
        label = one.recorded["attention"][-1]["labels"][0]["label"]
        assert f"“{label}”: {RULES[label]}" in shown.text
    assert browser.execute_script("return document.fonts.check('12px \"Source Sans 3\"')")
    browser.set_window_size(390, 844)
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    browser.set_window_size(1280, 1000)
    assert not browser.get_log("browser")


REQUESTS = "return performance.getEntriesByType('resource').filter((one) => one.name.endsWith('/look')).length"

HAVE_VALUES = """
const panels = [...document.querySelectorAll("#matrices .panel")];
return panels.length === 2 && panels.every((one) => one.querySelector("canvas"));
"""


@pytest.fixture
def comparison(live: Server, browser: Browser) -> Browser:
    """The live page with both runs."""
    open_live(browser, live, "mode=all&part=enc.1.self")
    wait(lambda: browser.find_elements(By.CSS_SELECTOR, "[data-key=other]"))
    set_control(browser, "#other", 2)
    browser.find_element(By.ID, "text").send_keys(marians.LINES[0])
    wait(lambda: text_of(browser, "models").count(marians.LINES[0]) == 2)
    wait(lambda: browser.execute_script(HAVE_VALUES))
    return browser


def test_the_live_comparison_asks_once_for_the_parts_of_both_models(comparison: Browser) -> None:
    browser = comparison
    wait(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#tokens canvas")) == 4)  # asked for when nobody types
    before = browser.execute_script(REQUESTS)
    time.sleep(1)
    assert browser.execute_script(REQUESTS) == before
    assert len(panels(browser, "matrices")) == 2 and not problems(browser)


def test_each_model_of_a_comparison_has_its_own_forced_tokens_and_parts_that_are_off(
    comparison: Browser,
) -> None:
    browser = comparison
    browser.execute_script("document.querySelectorAll('#change input[type=checkbox]')[1].click()")
    wait(lambda: "Switched off" in text_of(browser, "change"))
    assert "Nothing is switched off" in panels(browser, "change")[1].text
    browser.execute_script("document.querySelector('[data-key=mode-explore]').click()")
    browser.execute_script(FORCE)
    wait(lambda: "Remove forced tokens" in text_of(browser, "output"))
    set_control(browser, "[data-key=shown-model]", 1)
    wait(lambda: "Remove forced tokens" not in text_of(browser, "output"))
    assert not logged_problems(browser)


def panels(browser: Browser, section: str) -> list[Any]:
    return browser.find_elements(By.CSS_SELECTOR, f"#{section} .panel")


def test_the_last_of_two_cells_is_shown(comparison: Browser) -> None:
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


def test_a_request_that_was_given_up_stops_and_other_threads_keep_their_number(runs: Runs) -> None:
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
        (["a man", "--port", "8080"], ["--port", "with TEXT"]),
    ],
)
def test_options_that_do_not_apply_are_refused(arguments: list[str], named: list[str], runs: Runs) -> None:
    done = transduce("inspect", runs["transformer"], *arguments)
    assert done.code == 2 and done.err.count("\n") == 1 and all(one in done.err for one in named)


def test_two_models_in_a_terminal_are_named(runs: Runs) -> None:
    both = [runs["transformer"], runs["rnn"]]
    asked = ("inspect", both[0], "a man", "--compare", both[1])
    titles = [f"{run}:" for run in both]
    assert [line for line in transduce(*asked).out.splitlines() if line in titles] == titles
    assert len([json.loads(line) for line in transduce(*asked, "--json").out.splitlines()]) == 2


def test_a_refused_picture_leaves_no_page(runs: Runs, tmp_path: Path) -> None:
    done = transduce("inspect", runs["transformer"], "a", "--html", tmp_path / "x.html", "--svg", tmp_path / "x.bmp")
    assert done.code == 2 and "use .svg or .png" in done.err and not list(tmp_path.iterdir())


def test_a_reload_replaces_the_models_of_the_page(runs: Runs, tmp_path: Path) -> None:
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


def test_two_models_side_by_side(runs: Runs, browser: Browser, write_page: WritePage) -> None:
    page = write_page(runs["transformer"], marians.LINES[0], "--compare", runs["rnn"])
    browser.get(page.as_uri() + "#all")
    wait(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#tokens .panel")) == 2)
    assert not problems(browser)
