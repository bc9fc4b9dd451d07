"""TensorBoard and the report, opened in a real browser: what stands on the pages is what the run has written."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import urllib.request

import pytest

from launch.local import free_ports
from tests.running import lines, summary, trainer

selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (it comes with .[dev])")

DEEP = """
const found = [];
const walk = (node) => {
  if (node.shadowRoot) walk(node.shadowRoot);
  for (const child of node.childNodes || []) {
    if (child.nodeType === 3) found.push(child.textContent.trim());
    else if (!["STYLE", "SCRIPT"].includes(child.tagName)) walk(child);
  }
};
walk(document.body);
return found.filter((text) => text).join("\\n");
"""
IMAGES = """
const found = [];
const walk = (node) => {
  if (node.tagName === "IMG" && node.naturalWidth) found.push([node.naturalWidth, node.naturalHeight]);
  if (node.shadowRoot) walk(node.shadowRoot);
  for (const child of node.children || []) walk(child);
};
walk(document.body);
return found;
"""


pytestmark = pytest.mark.xdist_group("browser")  # they share a run


@pytest.fixture(scope="module")
def browser():
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no Chromium here; on Debian: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1000"):
        options.add_argument(flag)
    page = selenium.Chrome(options, selenium.ChromeService(driver))
    page.set_page_load_timeout(120)
    yield page
    page.quit()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    here = tmp_path_factory.mktemp("project")
    trainer("--backend=jax", "--epochs=8", "--log_every=5", "--run_dir=runs/digits", "--model=mlp(units=64)", cwd=here)
    trainer("report", "--run_dir=runs/digits", cwd=here)
    return here / "runs/digits"


@contextlib.contextmanager
def tensorboard(directory: pathlib.Path):
    """TensorBoard's address, while it serves a directory."""
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "tensorboard.main", f"--logdir={directory}", f"--port={port}"]
    command += ["--load_fast=false", "--host=127.0.0.1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: _answers(f"http://127.0.0.1:{port}/data/runs"))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return bool(json.loads(answer.read()))
    except OSError:
        return False


def wait_until(holds, seconds: float = 90):
    """What `holds` returns, as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.5)
    return found


def _screenshot(browser, name: str) -> None:
    """Into the folder that ONECURVE_SCREENSHOTS names: how docs/images is made."""
    if folder := os.environ.get("ONECURVE_SCREENSHOTS"):
        browser.save_screenshot(f"{folder}/{name}.png")


def test_the_report(browser, run):
    browser.get(f"file://{run / 'report.html'}")
    rows = browser.execute_script(
        "return [...document.querySelectorAll('tr')].map(r => [...r.cells].map(c => c.innerText.trim()))"
    )
    shown = {row[0]: row[1:] for row in rows if len(row) > 1}
    final = summary(run)["final"]
    assert float(shown["loss"][0]) == pytest.approx(final["loss"], abs=1e-4)
    assert float(shown["val_accuracy"][0]) == pytest.approx(final["val_accuracy"], abs=1e-4)
    assert shown["weights"] == [summary(run)["weights_sha256"]]
    # The curve's points, as the browser has drawn them, against the log.
    points = browser.execute_script("return [...document.querySelector('polyline').points].map(p => [p.x, p.y])")
    logged = [line["loss"] for line in lines(run)]
    assert len(points) == len(logged)
    lowest, highest = logged.index(min(logged)), logged.index(max(logged))
    heights = [y for _, y in points]
    assert heights[lowest] == max(heights) and heights[highest] == min(heights)
    assert not browser.get_log("browser")
    _screenshot(browser, "report")


def test_tensorboard(browser, run):
    with tensorboard(run.parent) as address:
        browser.get(f"{address}/#timeseries")
        wait_until(lambda: re.search(r"/train\n(.*\n){,60}Relative", browser.execute_script(DEEP)))
        words = browser.execute_script(DEEP).split("\n")
        table = words.index("Relative", words.index("/train"))  # Run, Smoothed, Value, Step
        last = next(line for line in reversed(lines(run)) if "accuracy" in line)
        assert float(words[table + 3]) == pytest.approx(last["accuracy"], abs=1e-4)
        assert int(words[table + 4]) == last["step"]
        wait_until(lambda: [440, 440] in browser.execute_script(IMAGES))
        _screenshot(browser, "tensorboard")
        browser.get(f"{address}/#images")
        browser.refresh()
        wait_until(lambda: [440, 440] in browser.execute_script(IMAGES))
        browser.get(f"{address}/#text")
        browser.refresh()
        wait_until(lambda: "--model=mlp(units=64)" in browser.execute_script(DEEP))
        wait_until(lambda: "logits/kernel" in browser.execute_script(DEEP))
        browser.get(f"{address}/#hparams")
        browser.refresh()
        wait_until(lambda: "global_batch" in browser.execute_script(DEEP))
