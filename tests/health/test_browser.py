# SPDX-License-Identifier: Apache-2.0
"""The strip of states in a real browser: pointer and keyboard both bring its reasons up.

Run with `pytest -m browser tests/health`; skipped where there is no Chromium.
"""

import shutil
from pathlib import Path

import pytest

from gradloc.report.cli import main
from tests.report.browser.conftest import driver  # noqa: F401
from tests.report.browser.driving import open_page

pytestmark = pytest.mark.browser
RECORDINGS = Path(__file__).parent / "recordings"


@pytest.fixture(scope="module")
def collapsed_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collapsed")
    shutil.copy(RECORDINGS / "collapsed.jsonl", folder / "metrics.jsonl")
    out = folder / "report.html"
    assert main([str(folder), "-o", str(out)]) == 0
    return out


@pytest.mark.parametrize("width", [1280, 390])
def test_a_part_of_the_strip_says_its_reasons_when_pointed_at_or_tabbed_to(
    driver,  # noqa: F811
    collapsed_page,
    width,
):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    open_page(driver, collapsed_page, width)
    parts = [p for p in driver.find_elements(By.CSS_SELECTOR, ".noted") if p.is_displayed()]
    note = driver.find_element(By.ID, "state-note")
    assert note.text.startswith("Above the curve, the run's health")
    assert len(parts) >= 5

    ActionChains(driver).move_to_element(parts[0]).perform()
    assert note.text.startswith("Steps 8-9: warning. truncation: ")

    driver.find_element(By.ID, "theme").click()
    driver.find_element(By.CSS_SELECTOR, ".plot").send_keys(Keys.TAB)
    assert driver.switch_to.active_element.get_attribute("aria-label") == note.text
    driver.switch_to.active_element.send_keys(Keys.TAB)
    assert note.text.startswith("Steps 10-11: danger. ")
    assert not driver.get_log("browser")
