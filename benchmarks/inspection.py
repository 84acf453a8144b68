"""Latency of the live inspection page in headless Chromium: from a key press to the paint of the views in sight.

    python benchmarks/inspection.py --run RUN --text "a man in a blue shirt is standing on a ladder ."

    python benchmarks/inspection.py --page page.html     # how fast a kept page opens

RUN translates; needs chromium, chromedriver and selenium. Each press adds or deletes a letter at the end of the text.
The clock starts with the time stamp of the key event and stops after the first frame that has the new record. "look" is
the share of the server, and "attributions" the time until they are painted with their section in sight. Then the time
of a forward pass of a sentence pair is compared with that of a recorded one, in turns.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from transduce.inspection.analyses import log_prob, recorded_run
from transduce.inspection.inspected_models import open_subject

WATCH = """
let pressed = 0;
window.times = [];
document.getElementById("text").addEventListener("keydown", (event) => { pressed = event.timeStamp; }, true);
const after = (key) => requestAnimationFrame(() => setTimeout(() => {
  const looks = performance.getEntriesByType("resource").filter((one) => one.name.endsWith("/look"));
  const look = looks.find((one) => one.startTime >= pressed);
  times.push([key, performance.now() - pressed, look ? look.duration : 0]);
}));
new MutationObserver(() => after("paint")).observe(document.getElementById("models"), { childList: true });
new MutationObserver(() => {
  if (document.querySelector("#tokens [data-key^=saliency]")) after("attributions");
}).observe(document.querySelector("#tokens .panels"), { childList: true, subtree: true });
"""
ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,1000", "--disable-dev-shm-usage")


def measure(browser: webdriver.Chrome, presses: int, section: str) -> list[list[Any]]:
    """Press keys while a section is in sight: [kind of event, ms since the press, ms of the first request]."""
    box = browser.find_element(By.ID, "text")
    browser.execute_script("times.length = 0")
    for i in range(presses):
        box.send_keys("a" if i % 2 == 0 else Keys.BACKSPACE)
        browser.execute_script(f"document.getElementById('{section}').scrollIntoView()")
        time.sleep(1)
    found: list[list[Any]] = browser.execute_script("return times")
    return found


def show(name: str, values: list[float]) -> None:
    ordered = sorted(values)
    median, late = statistics.median(ordered), ordered[int(0.9 * (len(ordered) - 1))]
    print(f"{name:<24} median {median:6.0f} ms   90 % {late:6.0f} ms   {len(ordered)} times", flush=True)


def start_browser() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    for one in (*ARGUMENTS, f"--user-data-dir={tempfile.mkdtemp()}"):
        options.add_argument(one)
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def open_page(page: Path, times: int = 7) -> None:
    """From the start of the navigation to the first frame, and to the last section."""
    browser, firsts, lasts = start_browser(), list[float](), list[float]()
    for _ in range(times):
        browser.get("about:blank")
        browser.get(page.absolute().as_uri())
        while not browser.execute_script("return document.querySelector('#change .panel')?.children.length"):
            time.sleep(0.005)
        lasts.append(browser.execute_script("return performance.now()"))
        time.sleep(0.5)
        firsts.append(browser.execute_script("return performance.getEntriesByType('paint').at(-1).startTime"))
    browser.quit()
    print(f"{page.stat().st_size:,} bytes, load average {os.getloadavg()[0]:.1f}")
    show("first paint", firsts)
    show("all sections", lasts)


def recording(run: Path, text: str, times: int = 60) -> None:
    subject = open_subject(run, device="cpu")
    torch.set_num_threads(1)
    sentence = subject.read(subject.model, text, None, ())

    def forward() -> float:
        began = time.perf_counter()
        with torch.no_grad():
            log_prob(subject, subject.model, sentence)
        return time.perf_counter() - began

    def recorded() -> float:
        began = time.perf_counter()
        recorded_run(subject, subject.model, sentence)
        return time.perf_counter() - began

    pairs = [(forward(), recorded()) for _ in range(times)][5:]
    plain, kept = (1000 * statistics.median(one) for one in zip(*pairs, strict=True))
    print(f"forward pass {plain:.2f} ms, recorded {kept:.2f} ms: {kept / plain:.2f} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--text")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--presses", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.page is not None:
        return open_page(arguments.page)
    if arguments.run is None or not arguments.text:
        parser.error("give --run and --text, or --page")
    command = [sys.executable, "-m", "transduce", "inspect", str(arguments.run), "--no-browser"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    browser = start_browser()
    try:
        assert server.stderr is not None
        address = next(line.split()[-1] for line in server.stderr if "look inside" in line)
        threading.Thread(target=server.stderr.read, daemon=True).start()
        browser.get(address)
        while not browser.find_elements(By.CSS_SELECTOR, "#text"):
            time.sleep(0.1)
        browser.find_element(By.ID, "text").clear()  # of the example
        browser.find_element(By.ID, "text").send_keys(arguments.text)
        time.sleep(3)
        browser.execute_script(WATCH)
        print(f"load average at the start: {os.getloadavg()[0]:.1f}")
        tokens = browser.execute_script("return document.querySelectorAll('[data-key=token-src]').length")
        assert tokens, "the page shows the source"
        for section in ("text", "tokens"):
            times = measure(browser, arguments.presses, section)
            firsts = [one for one in times if one[0] == "paint"]
            show(f"{section} in sight: paint", [ms for _, ms, _ in firsts])
            show(f"{section} in sight: look", [ms for *_, ms in firsts])
            late = [ms for kind, ms, _ in times if kind == "attributions"]
            if section == "tokens" and late:
                show("attributions", late)
        print(f"load average at the end: {os.getloadavg()[0]:.1f}")
    finally:
        browser.quit()
        server.terminate()
        server.wait()
    recording(arguments.run, arguments.text)


if __name__ == "__main__":
    main()
