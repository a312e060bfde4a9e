# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven: pages are written, opened, waited for."""

import importlib.util
import json
import time

from gradloc.report import output
from gradloc.report.pages import page
from gradloc.report.runs.run import read_run
from tests.report.builder import REPO

_spec = importlib.util.spec_from_file_location("screenshot_report", REPO / "scripts" / "screenshot_report.py")
shots = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shots)


def written(run, folder=None):
    """The page of a run, in the run's folder or another."""
    out = (folder or run) / "report.html"
    output.write(out, page.render(read_run(run)))
    return out


def wait(driver, script, *arguments, seconds=20):
    """Wait until a script's answer is true."""
    end = time.monotonic() + seconds
    while not driver.execute_script(script, *arguments):
        assert time.monotonic() < end, script
        time.sleep(0.05)


def opened(driver, step):
    """Wait until the event of that step is the one that is open."""
    name = f"event-step{step:06d}-epoch0-mini0"
    wait(driver, "return document.querySelector('#stage article')?.id === arguments[0]", name)


def press(driver, keys):
    find(driver, "body")[0].send_keys(keys)


def open_page(driver, path, width=1280, fragment=""):
    driver.get_log("browser")
    driver.get_log("performance")
    driver.get("about:blank")  # a fragment alone would not load the page anew
    shots.show(driver, path, width, 900, is_dark=False, fragment=fragment)


def requests(driver) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [m for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [m["params"]["request"]["url"] for m in sent]


def find(driver, query):
    return driver.find_elements("css selector", query)
