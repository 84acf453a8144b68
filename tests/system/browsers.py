"""Headless Chromium for the tests of pages."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

Browser: TypeAlias = "webdriver.Chrome"  # imported when it is first used: it asks whether there is IPv6
MARKS = [
    pytest.mark.loopback,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromedriver") is None, reason="no Chromium with its driver"),
]
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    "--window-size=1280,1000",
)


def start_browser(downloads: Path) -> Browser:
    """Start a browser that writes downloads to this folder."""
    options = webdriver.ChromeOptions()
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def wait(condition: Callable[[], Any], seconds: float = 20) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    assert found
    return found


def logged_problems(browser: Browser) -> list[Any]:
    return [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
