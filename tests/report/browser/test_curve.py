# SPDX-License-Identifier: Apache-2.0
"""The curve, paper, copying and accessibility in a real browser."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.report.browser.driving import find, open_page, opened, press, shots, wait

pytestmark = pytest.mark.browser

_PACKAGE = find_spec("axe_core_python")
AXE = Path(os.environ.get("AXE_CORE") or (Path(_PACKAGE.origin).with_name("axe.min.js") if _PACKAGE else ""))
"""axe-core's axe.min.js: the one that AXE_CORE names, else the package's."""

PLACES = """
const [over] = document.querySelectorAll(".u-over");
const inside = over.getBoundingClientRect();
const seen = [...document.querySelectorAll(".u-cursor-x, .u-cursor-pt")]
  .filter((item) => getComputedStyle(item).display !== "none")
  .map((item) => item.getBoundingClientRect());
return seen.every((item) => item.left >= inside.left - 8 && item.right <= inside.right + 8);
"""


def test_the_curve_tells_values_and_zooms(driver, long_run_page):
    from selenium.webdriver import ActionChains

    open_page(driver, long_run_page)
    plot = find(driver, ".u-over")[0]
    driver.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot)
    ActionChains(driver).move_to_element(plot).perform()
    keys = find(driver, ".keys")[0]
    assert keys.text.startswith("step ")
    pointed = {" ".join(key.text.split()[:-1]) for key in find(driver, ".key, .plot .name")}
    assert {"mean of the step", "threshold", "critic/score/mean"} <= pointed
    whole = find(driver, ".whole")[0]
    assert not whole.is_displayed()
    dragged = ActionChains(driver).move_to_element_with_offset(plot, -200, 0).click_and_hold()
    dragged.move_by_offset(75, 0).move_by_offset(75, 0).release().perform()
    assert whole.is_displayed()
    shown = "return document.querySelectorAll('.u-over .mark:not([hidden])').length"
    assert 10 < driver.execute_script(shown) < 60
    assert driver.execute_script("return getSelection().isCollapsed")
    width, below = plot.size["width"], plot.size["height"] // 2 - 8  # marks, which have a text of their own, lie higher
    for place in range(20):
        ActionChains(driver).move_to_element_with_offset(plot, int((place / 19 - 0.5) * (width - 4)), below).perform()
        assert driver.execute_script(PLACES), f"the cursor left the plot at place {place}"
        step, *_ = find(driver, ".keys .step")
        assert step.text.startswith("step ")
    ActionChains(driver).double_click(plot).perform()
    assert not whole.is_displayed() and driver.execute_script(shown) == 200


def test_the_curve_and_the_events_go_by_keyboard_alone(driver, long_run_page):
    from selenium.webdriver import Keys

    open_page(driver, long_run_page)
    plot, whole = find(driver, ".plot")[0], find(driver, ".whole")[0]
    plot.send_keys(Keys.ARROW_RIGHT)
    assert find(driver, ".keys .step")[0].text == "step 1"
    assert "threshold 52.26" in find(driver, ".readout")[0].get_property("textContent")
    for _ in range(3):
        plot.send_keys(Keys.ARROW_RIGHT)
    plot.send_keys("+")
    assert whole.is_displayed() and driver.execute_script(PLACES)
    plot.send_keys("-", "-", "-")
    assert not whole.is_displayed()
    plot.send_keys("+")
    plot.send_keys("0")
    assert not whole.is_displayed()
    for _ in range(7):
        plot.send_keys(Keys.ARROW_RIGHT)
    plot.send_keys(Keys.ENTER)
    opened(driver, 7)
    reached = set()
    press(driver, Keys.TAB)
    for _ in range(120):
        reached.add(driver.execute_script("return document.activeElement.id || document.activeElement.className"))
        driver.switch_to.active_element.send_keys(Keys.TAB)
    assert {"help-button", "theme", "plot", "search", "only-cause", "copy", "copy issue", "with-text"} <= reached


def test_the_page_of_a_log_goes_from_its_spike_to_the_line_to_copy_by_keyboard_alone(driver, log_page):
    from selenium.webdriver import Keys

    open_page(driver, log_page)
    assert [mark.get_attribute("aria-label") for mark in find(driver, ".u-over .mark")] == ["spike at step 47"]
    titles = [" ".join(title.text.split()[:-3]) for title in find(driver, ".hero .sparks figcaption")]
    assert titles == ["reward", "entropy", "response length"]
    find(driver, ".plot")[0].send_keys(*[Keys.ARROW_RIGHT] * 47, Keys.ENTER)
    wait(driver, "return location.hash === '#what-to-do'")
    driver.switch_to.active_element.send_keys(Keys.TAB)
    assert "copy" in driver.switch_to.active_element.get_attribute("class").split()


@pytest.mark.parametrize("width", [1280, 390])
def test_a_part_of_the_strip_says_its_reasons_when_pointed_at_or_tabbed_to(driver, collapsed_page, width):
    from selenium.webdriver import ActionChains, Keys

    open_page(driver, collapsed_page, width)
    parts = [part for part in find(driver, ".noted") if part.is_displayed()]
    note = find(driver, "#state-note")[0]
    assert note.text.startswith("Above the curve, the run's health")
    assert len(parts) >= 5

    ActionChains(driver).move_to_element(parts[0]).perform()
    assert note.text.startswith("Steps 8-9: warning. truncation: ")

    find(driver, "#theme")[0].click()
    find(driver, ".plot")[0].send_keys(Keys.TAB)
    assert driver.switch_to.active_element.get_attribute("aria-label") == note.text
    driver.switch_to.active_element.send_keys(Keys.TAB)
    assert note.text.startswith("Steps 10-11: danger. ")
    assert not driver.get_log("browser")


def test_two_fingers_zoom_the_curve_and_one_moves_it(driver, long_run_page):
    shots.show(driver, long_run_page, 400, 850, is_dark=False)
    plot = find(driver, ".u-over")[0]
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    box = driver.execute_script("return arguments[0].getBoundingClientRect().toJSON()", plot)

    def touch(kind: str, *places: float) -> None:
        points = [{"x": box["x"] + place, "y": box["y"] + 40, "id": index} for index, place in enumerate(places)]
        driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    def first() -> int:
        shown = "return [...document.querySelectorAll('.u-over .mark:not([hidden])')].map((link) => link.ariaLabel)"
        return min(int(label.split()[-1]) for label in driver.execute_script(shown))

    driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2})
    touch("touchStart", 120, 180)
    touch("touchMove", 60, 240)
    touch("touchEnd")
    assert find(driver, ".whole")[0].is_displayed()
    before = first()
    touch("touchStart", 200)
    touch("touchMove", 120)
    touch("touchEnd")
    assert first() > before > 1
    driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


def test_an_issue_is_copied_without_text_and_with_it_on_request(driver, demo_page):
    open_page(driver, demo_page)
    for name in ("clipboard-write", "clipboard-read"):
        driver.execute_cdp_cmd("Browser.setPermission", {"permission": {"name": name}, "setting": "granted"})
    read = "const done = arguments[0]; navigator.clipboard.readText().then(done, (error) => done(String(error)))"
    button = find(driver, ".copy.issue")[0]
    button.click()
    wait(driver, "return document.querySelector('.copy.issue').textContent === 'Copied'")
    plain = driver.execute_async_script(read)
    assert plain.startswith("### One token made the step-24 spike") and "42+36" not in plain and "```sh" in plain
    find(driver, ".with-text")[0].click()
    wait(driver, "return document.querySelector('.copy.issue').textContent === 'Copy as an issue'")
    button.click()
    wait(driver, "return document.querySelector('.copy.issue').textContent === 'Copied'")
    told = driver.execute_async_script(read)
    assert told.startswith(plain) and "so the answer⟦ is⟧ 78." in told


def test_paper_has_everything_open_in_the_colours_of_the_day(driver, demo_page):
    shots.show(driver, demo_page, 1280, 900, is_dark=True)
    before = (
        "return [document.querySelectorAll('details:not([open])').length, document.documentElement.dataset.theme ?? '']"
    )
    closed, theme = driver.execute_script(before)
    assert closed > 3 and not theme
    driver.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert driver.execute_script(before) == [0, "light"]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    wide = driver.execute_script("return document.querySelector('.uplot').getBoundingClientRect().width")
    assert wide == 680, "on A4"
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    driver.execute_script("dispatchEvent(new Event('afterprint'))")
    assert driver.execute_script(before) == [closed, theme]
    printed = driver.execute_cdp_cmd("Page.printToPDF", {"paperWidth": 8.27, "paperHeight": 11.69})
    assert len(printed["data"]) > 50_000


def test_the_curve_takes_the_theme_s_colours(driver, demo_page):
    open_page(driver, demo_page)
    pixels = """
    const canvas = document.querySelector(".uplot canvas");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const found = {};
    for (let at = 0; at < data.length; at += 4) if (data[at + 3] === 255) {
      const colour = `${data[at]},${data[at + 1]},${data[at + 2]}`;
      found[colour] = (found[colour] ?? 0) + 1;
    }
    return found;
    """
    assert "31,100,168" in driver.execute_script(pixels), "LIGHT.calm"
    find(driver, "#theme")[0].click()
    wait(driver, f"return '125,184,240' in (() => {{{pixels}}})()")


def axe(driver, path, width: int, is_dark: bool) -> list[str]:
    """What axe-core finds on a page: rule and element."""
    shots.show(driver, path, width, 900, is_dark)
    driver.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text(encoding="utf-8")})
    run = "const done = arguments[0]; axe.run().then((found) => done(found.violations), (error) => done(String(error)))"
    found = driver.execute_async_script(run)
    return [f"{rule['id']}: {node['html'][:120]}" for rule in found for node in rule["nodes"]]


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not here: pip install axe-core-python==0.1.0")
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1440, 768, 390])
def test_axe_finds_nothing(driver, demo_page, long_run_page, hostile_page, log_page, width, is_dark):
    for path in (demo_page, long_run_page, hostile_page, log_page):
        assert axe(driver, path, width, is_dark) == []
