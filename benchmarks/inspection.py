"""Latency of the live inspection page in headless Chromium: from a key press to the paint of the views in sight.

    python benchmarks/inspection.py --run RUN --text "a man in a blue shirt is standing on a ladder ."

RUN translates; needs chromium, chromedriver and selenium. Each press adds or deletes a letter at the end of the text.
The clock starts with the time stamp of the key event and stops after the first frame that has the new record. "look" is
the share of the server, and "attributions" the time until they are painted with their section in sight.
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

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

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
    print(f"{name:<24} median {median:6.0f} ms   90 % {late:6.0f} ms   {len(ordered)} presses", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--presses", type=int, default=20)
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "transduce", "inspect", str(arguments.run), "--no-browser"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    options = webdriver.ChromeOptions()
    for one in (*ARGUMENTS, f"--user-data-dir={tempfile.mkdtemp()}"):
        options.add_argument(one)
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        assert server.stderr is not None
        address = next(line.split()[-1] for line in server.stderr if "look inside" in line)
        threading.Thread(target=server.stderr.read, daemon=True).start()
        browser.get(address)
        while not browser.find_elements(By.CSS_SELECTOR, "#text"):
            time.sleep(0.1)
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


if __name__ == "__main__":
    main()
