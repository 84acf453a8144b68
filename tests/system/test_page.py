"""The web page in headless Chromium, against a real server."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import parse_qs, urldefrag

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import marians
from servers import Server
from system.browsers import MARKS, Browser, logged_problems, wait
from transduce import DecodingOptions, Generator, Translator

pytestmark = MARKS
Runs = tuple[Path, Path]
TEXT = f"{marians.LINES[0]}\n\n{marians.LINES[1]}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    path = tmp_path_factory.mktemp("runs")
    return marians.make_run(path / "there", seed=2), marians.make_run(path / "back", seed=7)


@pytest.fixture(scope="module")
def server(runs: Runs, gpt: Path) -> Iterator[Server]:
    server = Server(f"en-de={runs[0]}", f"de-en={runs[1]}", gpt, "--inspect")
    yield server
    server.stop()


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Browser]:
    browser.get(server.url)
    wait(lambda: browser.find_elements(By.CSS_SELECTOR, "#source option"))
    yield browser
    assert not (problems := logged_problems(browser)), problems


def output(page: Browser) -> str:
    return page.find_element(By.ID, "output").get_property("textContent")  # type: ignore[return-value]


def test_translation_while_typing_and_the_swap_of_languages(page: Browser, runs: Runs) -> None:
    there, back = (Translator.load(run) for run in runs)
    lines = marians.LINES[:2]
    expected = "\n\n".join(one.text for one in there.translate(lines))
    page.find_element(By.ID, "input").send_keys(TEXT)
    wait(lambda: output(page) == expected)
    page.find_element(By.ID, "swap").click()
    wait(lambda: page.find_element(By.ID, "source").get_property("value") == "de")
    expected = "\n\n".join(back.translate([line])[0].text for line in expected.split("\n\n"))
    wait(lambda: output(page).replace(" ", "") == expected.replace(" ", ""))
    page.find_element(By.ID, "clear").click()
    wait(lambda: output(page) == "")


def test_alternatives_of_a_word_by_keyboard_alone(page: Browser, server: Server, runs: Runs) -> None:
    page.switch_to.active_element.send_keys(marians.LINES[3])
    words = wait(lambda: page.find_elements(By.CSS_SELECTOR, ".word"))
    before = output(page)
    page.execute_script("arguments[0].focus()", words[0])
    page.switch_to.active_element.send_keys(Keys.ENTER)
    buttons = wait(lambda: page.find_elements(By.CSS_SELECTOR, "#choices button"))
    found = [button.text for button in buttons]
    options = DecodingOptions(beam=16, n_best=16)
    (expected,) = Translator.load(runs[0]).translate([marians.LINES[3]], options)
    assert set(found) <= {one.text for one in expected.candidates} and before not in found
    changed = [b.text for b in buttons[0].find_elements(By.TAG_NAME, "b")]
    assert (
        changed
        and set(changed) <= set(found[0].split())
        and set(found[0].split()) - set(before.split()) <= set(changed)
    )
    address, choices = urldefrag(page.find_element(By.ID, "inside").get_attribute("href") or "")
    assert address == f"{server.url}/inspect/" and parse_qs(choices)["s"] == [marians.LINES[3]]
    page.switch_to.active_element.send_keys(Keys.ENTER)
    wait(lambda: output(page) == found[0])
    assert not page.find_element(By.ID, "alternatives").is_displayed()


def test_alternatives_open_at_the_word_and_close_with_escape(page: Browser) -> None:
    put(page, marians.LINES[3])
    word = wait(lambda: page.find_elements(By.CSS_SELECTOR, ".word"))[0]
    for width in (1280, 390):
        page.set_window_size(width, 900)
        word.click()
        wait(lambda: page.find_elements(By.CSS_SELECTOR, "#choices button"))
        box, place = page.find_element(By.ID, "alternatives").rect, word.rect
        gaps = box["y"] - place["y"] - place["height"], place["y"] - box["y"] - box["height"]
        assert 0 <= max(gaps) < 12 and 0 <= box["x"] <= width - box["width"] and box["y"] >= 0
        page.switch_to.active_element.send_keys(Keys.ESCAPE)
        wait(lambda: not page.find_element(By.ID, "alternatives").is_displayed())
        assert page.switch_to.active_element == word
    page.set_window_size(1280, 1000)


def test_a_file_is_dropped_on_the_text(page: Browser, runs: Runs, downloads: Path) -> None:
    page.execute_script(
        """const files = new DataTransfer();
        files.items.add(new File([arguments[0]], "dropped.txt"));
        const drop = (kind) => document.getElementById("input").dispatchEvent(
            new DragEvent(kind, {dataTransfer: files, bubbles: true, cancelable: true}));
        drop("dragover"); window.shown = document.getElementById("field").className; drop("drop");""",
        marians.LINES[0],
    )
    assert page.execute_script("return shown") == "dropping" and not page.find_elements(By.CSS_SELECTOR, ".dropping")
    link = page.find_element(By.ID, "download")
    wait(link.is_displayed)
    link.click()
    path = downloads / "dropped.de.txt"
    wait(path.exists)
    assert path.read_text(encoding="utf-8") == f"{Translator.load(runs[0]).translate([marians.LINES[0]])[0].text}\n"


def test_the_card_fills_the_window_and_the_theme_is_kept(page: Browser, server: Server) -> None:
    bottom = "return document.getElementById('card').getBoundingClientRect().bottom / innerHeight"
    for path in ("", "/generate"):
        page.get(server.url + path)
        for width in (1280, 390):
            page.set_window_size(width, 900)
            assert page.execute_script(bottom) > 0.8
    page.get(f"{server.url}/docs")
    assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    page.set_window_size(1280, 1000)
    page.get(server.url)
    theme = "return document.documentElement.dataset.theme"
    before = page.execute_script(theme)
    page.find_element(By.ID, "theme").click()
    page.get(server.url)
    assert page.execute_script(theme) != before
    font = "return document.fonts.ready.then(() => document.fonts.check('12px \"Source Sans 3\"'))"
    assert page.execute_script(font)
    wait(page.find_element(By.ID, "inside-link").is_displayed)
    page.execute_script("localStorage.clear()")


def test_confidence_and_themes(page: Browser) -> None:
    page.find_element(By.ID, "input").send_keys(marians.LINES[0])
    word = wait(lambda: page.find_elements(By.CSS_SELECTOR, ".word"))[0]
    plain = word.value_of_css_property("background-color")
    page.find_element(By.ID, "confidence").click()
    assert word.value_of_css_property("background-color") != plain
    body = page.find_element(By.TAG_NAME, "body")
    light = body.value_of_css_property("background-color")
    page.find_element(By.ID, "theme").click()
    assert body.value_of_css_property("background-color") != light


@pytest.mark.parametrize("suffix", ["txt", "tsv"])
def test_files(page: Browser, runs: Runs, downloads: Path, tmp_path: Path, suffix: str) -> None:
    lines = [*marians.LINES, "", *marians.LINES[:7]]
    file = tmp_path / f"in.{suffix}"
    file.write_text("".join(f"{line}\tx\n" if suffix == "tsv" else f"{line}\n" for line in lines), encoding="utf-8")
    page.find_element(By.ID, "file").send_keys(str(file))
    link = page.find_element(By.ID, "download")
    wait(link.is_displayed, 60)
    link.click()
    path = downloads / f"in.de.{suffix}"
    wait(path.exists)
    translations = [one.text for one in Translator.load(runs[0]).translate(lines)]
    if suffix == "tsv":
        translations = [f"{line}\tx\t{text}" for line, text in zip(lines, translations, strict=True)]
    assert path.read_text(encoding="utf-8").splitlines() == translations


def test_files_that_are_not_text_are_refused(page: Browser, tmp_path: Path) -> None:
    for content, message in ((b"K\xe4se", "not UTF-8"), (b"", "empty")):
        file = tmp_path / f"{len(content)}.txt"
        file.write_bytes(content)
        page.find_element(By.ID, "file").send_keys(str(file))
        wait(partial(lambda text: text in page.find_element(By.ID, "file-state").text, message))


def put(page: Browser, text: str) -> None:
    script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
    page.execute_script(script, page.find_element(By.ID, "input"), text)


def test_long_texts_are_sent_in_parts_and_only_changed_lines_again(page: Browser, runs: Runs) -> None:
    page.execute_script(
        "window.sent = []; const fetch = window.fetch;"
        "window.fetch = (path, request) => { sent.push(JSON.parse(request.body).text); return fetch(path, request); }"
    )
    lines = [line for number in "ab" for line in [*(f"{number} {line}" for line in marians.LINES[:20]), ""]]
    expected = [one.text for one in Translator.load(runs[0]).translate([*lines, marians.LINES[30]])]
    put(page, "\n".join(lines))
    wait(lambda: output(page) == "\n".join(expected[:-1]))
    put(page, "\n".join([*lines[:5], marians.LINES[30], *lines[6:]]))
    wait(lambda: output(page) == "\n".join([*expected[:5], expected[-1], *expected[6:-1]]))
    *parts, last = page.execute_script("return window.sent")
    assert len(parts) == 2 and [*parts[0], *parts[1]] == list(filter(None, lines)) and last == [marians.LINES[30]]


def test_a_service_that_does_not_answer_is_asked_again(page: Browser) -> None:
    def status() -> str:
        return page.find_element(By.ID, "status").text

    page.execute_script("window.real = window.fetch")
    for answer, message in (
        ("Promise.reject(new TypeError('Failed to fetch'))", "cannot be reached. Trying again"),
        ('Promise.resolve(new Response(\'{"error": "busy"}\', {status: 429}))', "busy. Trying again"),
    ):
        page.execute_script(f"window.fetch = () => {answer}")
        put(page, message)
        wait(partial(lambda text: text in status(), message))
        page.execute_script("window.fetch = window.real")
        wait(lambda: "Trying" not in status() and page.find_elements(By.CSS_SELECTOR, ".word"))
    page.execute_script('window.fetch = () => Promise.resolve(new Response(\'{"error": "no"}\', {status: 400}))')
    put(page, "x")
    wait(lambda: status() == "no" and output(page) == "...")


def test_arrow_keys_and_right_to_left_text(page: Browser) -> None:
    put(page, marians.LINES[0])
    words = [word.text for word in wait(lambda: page.find_elements(By.CSS_SELECTOR, ".word"))]
    page.find_element(By.ID, "output").send_keys(Keys.ARROW_RIGHT)
    for place in (1, 2):
        page.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
        assert page.switch_to.active_element.text == words[min(place, len(words) - 1)]
    assert page.find_element(By.ID, "input").value_of_css_property("direction") == "ltr"
    put(page, "\u05e9\u05dc\u05d5\u05dd")
    assert page.find_element(By.ID, "input").value_of_css_property("direction") == "rtl"


@pytest.mark.parametrize("path", ["", "/generate"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_is_wider_than_the_screen_and_everything_has_a_label(
    page: Browser, server: Server, path: str, width: int
) -> None:
    page.get(server.url + path)
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.find_element(By.ID, "input").send_keys("A" * 200)
    assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    unnamed = """return [...document.querySelectorAll("button, select, textarea, input, progress")].filter((one) =>
        !one.textContent.trim() && !one.ariaLabel && !one.hasAttribute("aria-labelledby") && !one.labels?.length
    ).map((one) => one.outerHTML)"""
    assert page.execute_script(unnamed) == []


def marked_text(page: Browser) -> str:
    return page.execute_script("return [...document.querySelectorAll('mark')].map((one) => one.textContent).join('')")


def test_a_word_marks_the_words_that_it_translates(page: Browser, runs: Runs) -> None:
    translator = Translator.load(runs[0])
    lines = ["😀 A dog.", marians.LINES[3]]  # JavaScript counts two units for the first character
    page.execute_script("arguments[0].value = arguments[1]", page.find_element(By.ID, "input"), "\n".join(lines))
    page.find_element(By.ID, "input").send_keys(" ")
    wait(lambda: output(page).count("\n") == 1)
    page.execute_script(
        """window.real = window.fetch; window.signals = [];
        window.fetch = (path, { signal }) => new Promise((_, reject) => {
            signals.push(signal); signal.addEventListener("abort", () => reject(signal.reason)); });"""
    )
    for number in (0, 1):  # the second cancels the first, which is asked for again later
        page.execute_script(f"document.querySelector('.word[data-sentence=\"{number}\"]').focus()")
    assert page.execute_script("return signals.map((one) => one.aborted)") == [True, False]
    page.execute_script("window.fetch = window.real; document.activeElement.blur()")
    expected = []
    for number, line in enumerate(lines):
        (translation,) = translator.translate([line])
        (links,) = translator.align([line], [translation.text])
        for word in page.find_elements(By.CSS_SELECTOR, f".word[data-sentence='{number}']")[:3]:
            start = int(word.get_attribute("data-start") or 0)
            end = start + len(word.text)
            places = {i for a, b, c, d in links if c < end and start < d for i in range(a, b)}
            expected.append("".join(line[i] for i in sorted(places)))
            page.execute_script("arguments[0].focus()", word)
            wait(partial(lambda text: marked_text(page) == text, expected[-1]))
    assert any(expected)


def test_a_language_model_continues_a_text(page: Browser, gpt: Path) -> None:
    page.find_element(By.LINK_TEXT, "Generate text").click()
    wait(lambda: page.find_elements(By.CSS_SELECTOR, "#model option"))
    assert page.find_element(By.ID, "translate-link").is_displayed()
    page.find_element(By.ID, "seed").send_keys("5")
    field = page.find_element(By.ID, "input")
    field.send_keys("Der Hund", Keys.CONTROL, Keys.ENTER)
    status = page.find_element(By.ID, "status")
    wait(lambda: "tokens" in status.text)
    options = DecodingOptions(max_length=100, sample=True, temperature=0.8, seed=5)
    generator = Generator.load(gpt)
    (expected,) = generator.generate(["Der Hund"], options)
    shown = f"Der Hund{expected.text}".replace("\r\n", "\n").replace("\r", "\n")  # as a text area does
    assert field.get_property("value") == shown and f"{len(expected.ids)} tokens" in status.text

    # the model's tokens are marked, and the field says the probability of the one at the cursor
    tokens = "return [...document.querySelectorAll('#marks mark')].map((one) => one.textContent)"
    wait(lambda: len(page.execute_script(tokens)) == len(expected.ids))
    assert shown == "Der Hund" + "".join(page.execute_script(tokens))
    (prompt,) = generator.start(["Der Hund"], options, cut_prompt=False)
    probability = 100 * math.exp(generator.token_log_probs(prompt.ids, expected.ids)[0])
    page.execute_script("document.getElementById('input').setSelectionRange(8, 8)")
    assert probability >= 10  # below, one decimal is shown
    wait(lambda: f"probability {probability:.0f} %" in page.find_element(By.ID, "token").text)
    field.send_keys(Keys.BACKSPACE)
    assert page.execute_script(tokens) == []
    page.find_element(By.ID, "undo").click()
    assert field.get_property("value") == "Der Hund" and not page.find_element(By.ID, "undo").is_enabled()
