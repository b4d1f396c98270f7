"""The report in a real browser, at desktop and phone width: `make test-browser`.

Chromium runs without a network; what it logs as an error fails the test.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from logra.report.page import write_report
from tests.test_report import made_up

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
SHOTS = Path(os.environ.get("LOGRA_SHOTS", "runs/screenshots"))
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "/usr/bin/chromium"
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver") or "/usr/bin/chromedriver"))
    yield driver
    driver.quit()


def requests_of(browser: Any) -> list[str]:
    """Addresses that the page asked for."""
    found = []
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            found.append(message["params"]["request"]["url"])
    return found


@pytest.mark.parametrize("size", sorted(SIZES))
def test_the_page_reads_and_filters(browser: Any, size: str, tmp_path: Path) -> None:
    runs = [made_up("logra", 0), made_up("logra", 1), made_up("adamw", 0), made_up("lora", 0)]
    path = write_report(runs, tmp_path / "report.html")
    width, height = SIZES[size]
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"},
    )
    browser.get_log("performance")
    browser.get(path.as_uri())
    SHOTS.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(SHOTS / f"report-{size}.png"))
    # The page itself does not scroll sideways, drawings fit, and each has its place.
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    drawings = browser.find_elements(By.CSS_SELECTOR, "figure svg")
    assert len(drawings) == 7
    for drawing in drawings:
        assert 250 <= drawing.rect["width"] <= width
        assert 100 <= drawing.rect["height"] <= drawing.rect["width"]
    # What a model wrote is text: no dialog, no picture, no second script.
    assert browser.find_elements(By.TAG_NAME, "img") == []
    samples = browser.find_element(By.ID, "samples").get_attribute("textContent")
    assert "<script>alert('x')</script>" in samples
    # Search and verdict narrow the table.
    rows = browser.find_elements(By.CSS_SELECTOR, "#samples tbody tr")
    assert len(rows) == 12
    search = browser.find_element(By.ID, "search")
    search.send_keys("adamw-0 alert")
    assert [row.is_displayed() for row in rows].count(True) == 3
    assert browser.find_element(By.ID, "count").text == "3 of 12 samples"
    browser.find_element(By.CSS_SELECTOR, "#verdict option:nth-child(2)").click()
    assert browser.find_element(By.ID, "count").text == "1 of 12 samples"
    search.clear()
    search.send_keys("no such words")
    assert browser.find_element(By.ID, "count").text == "0 of 12 samples"
    assert [url for url in requests_of(browser) if not url.startswith("file:")] == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_an_injected_script_does_not_run(browser: Any, tmp_path: Path) -> None:
    """Even if escaping failed, the page's policy would not let it run."""
    path = write_report([made_up("logra", 0)], tmp_path / "report.html")
    path.write_text(path.read_text().replace("</main>", "<script>document.title = 'taken'</script></main>"))
    browser.get(path.as_uri())
    assert browser.title != "taken"
    browser.get_log("browser")
