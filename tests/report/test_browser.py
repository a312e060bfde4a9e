# SPDX-License-Identifier: Apache-2.0
"""The report in a real browser: it is quiet, reaches for nothing, and its controls work.

Run with `pytest -m browser tests/report`. Chromium is installed from the distribution's packages
where that can be done; where there is none, the tests are skipped and say so.
"""

import importlib.util
import json
import os
import random
import threading
import time
from pathlib import Path

import pytest

from gradloc.report import output
from gradloc.report.live.follow import Follower
from gradloc.report.live.server import Site
from gradloc.report.pages import page
from gradloc.report.runs.run import read_run
from tests.report.builder import (
    HOSTILE,
    REPO,
    VISIBLE,
    make_culprit,
    make_event,
    make_metrics,
    make_sequence,
    write_run,
)
from tests.report.not_tokens import causes

_spec = importlib.util.spec_from_file_location("screenshot_report", REPO / "scripts" / "screenshot_report.py")
shots = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shots)

pytestmark = pytest.mark.browser

AXE = Path(os.environ["AXE_CORE"]) if os.environ.get("AXE_CORE") else None
"""axe-core's axe.min.js, which is no package of Python's."""


@pytest.fixture(scope="module")
def driver():
    if shots.missing():
        shots.install()
    problem = shots.missing()
    if problem:
        pytest.skip(f"no browser session: {problem}")
    with shots.browser() as made:
        yield made


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory):
    """Two events: hostile tokens, and a long sequence with a far culprit."""
    root = tmp_path_factory.mktemp("hostile")
    tokens = [*HOSTILE, *(f" w{i}" for i in range(3000))]
    events = [
        make_event(5, [make_culprit(3, token=HOSTILE[3])]),
        make_event(9, [make_culprit(1500)]),
    ]
    sequences = {
        events[0]["event_id"]: [make_sequence(tokens=HOSTILE)],
        events[1]["event_id"]: [make_sequence(tokens=tokens)],
    }
    return _write(write_run(root, events, sequences, make_metrics(20, (5, 9))))


@pytest.fixture(scope="module")
def long_run_page(tmp_path_factory):
    root = tmp_path_factory.mktemp("long")
    events = [make_event(step) for step in range(1, 201)]
    for event in events:
        event["trigger"]["grad_norm"] = 60.0 + (event["step"]["global_step"] * 37) % 101
    return _write(write_run(root, events, metrics=make_metrics(200, tuple(range(1, 201)))))


@pytest.fixture(scope="module")
def largest_page(tmp_path_factory):
    """2,000 events of 8 culprits, the worst with a sequence of 32k tokens; and the CPU seconds of its page."""
    root = tmp_path_factory.mktemp("largest")
    source = random.Random(0)
    tokens = [source.choice([" the", " so", "\n", " x", " ="]) for _ in range(32768)]
    tokens[20000:23000] = ["!"] * 3000
    events = []
    for step in range(1, 2001):
        culprits = [make_culprit(3 + 5 * index, token=f" t{step}x{index}") for index in range(8)]
        events.append(make_event(step, culprits))
        events[-1]["trigger"]["grad_norm"] = 100.0 + (step * 37) % 1013
    events[500]["trigger"]["grad_norm"] = 1e6
    sequences = {events[500]["event_id"]: [make_sequence(tokens=tokens)]}
    folder = write_run(root, events, sequences, make_metrics(2000, tuple(range(1, 2001))))
    start = time.process_time()  # whatever else the machine does
    path = _write(folder)
    return path, time.process_time() - start


def _write(folder):
    out = folder / "report.html"
    output.write(out, page.render(read_run(folder)))
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


CONTRAST = """
const channels = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => {
  const part = (v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
};
const behind = (element) => {
  const layers = [];
  for (let at = element; at; at = at.parentElement) {
    const [r, g, b, a = 1] = channels(getComputedStyle(at).backgroundColor);
    layers.unshift([r, g, b, a]);
  }
  const mix = (under, [r, g, b, a]) => [r, g, b].map((v, i) => v * a + under[i] * (1 - a));
  return layers.reduce(mix, [255, 255, 255]);
};
const worst = [];
const texts = "p, dt, dd, th, td, span, summary, code, button, legend, h1, h2, h3, h4, li, b, small, mark, kbd";
for (const element of document.querySelectorAll(texts)) {
  if (!element.textContent.trim() || !element.checkVisibility()) continue;
  const [one, two] = [light(channels(getComputedStyle(element).color)), light(behind(element))];
  const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
  const what = element.textContent.slice(0, 20);
  if (ratio < 4.5) worst.push(`${element.className} ${what} ${ratio.toFixed(2)}`);
}
return worst;
"""


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_every_text_has_the_contrast_that_wcag_asks_for(driver, demo_page, hostile_page, is_dark):
    for path in (demo_page, hostile_page):
        shots.show(driver, path, 1280, 900, is_dark)
        assert driver.execute_script(CONTRAST) == []


def test_every_control_can_be_reached_and_named(driver, demo_page, long_run_page):
    for path in (demo_page, long_run_page):
        open_page(driver, path)
        for control in find(driver, "button, a, summary, input, [tabindex]"):
            if control.is_displayed():
                assert control.accessible_name or control.text, control.get_attribute("outerHTML")


def find(driver, query):
    return driver.find_elements("css selector", query)


@pytest.fixture(scope="module")
def demo_page(tmp_path_factory):
    """What the demo left behind, kept in examples/."""
    out = tmp_path_factory.mktemp("demo") / "report.html"
    output.write(out, page.render(read_run(REPO / "examples" / "demo")))
    return out


@pytest.mark.parametrize("name", ["demo_page", "hostile_page", "long_run_page"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_quiet_and_requests_only_itself(driver, request, name, width):
    path = request.getfixturevalue(name)
    open_page(driver, path, width)
    assert [entry["message"] for entry in driver.get_log("browser")] == []
    asked = [url for url in requests(driver) if not url.startswith(("data:", "about:"))]
    assert asked == [path.resolve().as_uri()]


BOTTOM = """
const parts = document.querySelectorAll('.hero .headline, .hero .figures, .hero .card, .hero .todo .copy');
return [parts.length, Math.max(...[...parts].map((part) => part.getBoundingClientRect().bottom))];
"""


def test_what_why_whether_it_hurt_and_what_now_are_on_the_first_screen(driver, demo_page, long_run_page, tmp_path):
    pages = [demo_page, long_run_page]
    pages += [_write(write_run(tmp_path / name, [event])) for name, event in causes().items()]
    for path in pages:
        shots.show(driver, path, 1440, 900, is_dark=False)
        num_parts, bottom = driver.execute_script(BOTTOM)
        assert num_parts == 5 and bottom <= 900, path
        shots.show(driver, path, 400, 850, is_dark=True)
        assert driver.execute_script(CONTRAST) == [], path
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 400, path


@pytest.mark.parametrize("width", [1440, 400])
def test_a_culprit_after_a_long_chat_is_in_sight(driver, tmp_path, width):
    chat = "".join(f"a turn of the chat, as long as they are: {i}\n" for i in range(12))
    answer = make_culprit(token="24 + 6 = 90", text_before=chat, text_after="\nand so on" * 9, span="sequence")
    shots.show(driver, _write(write_run(tmp_path, [make_event(culprits=[answer])])), width, 900, is_dark=False)
    bounds = (
        "return ['.passage', '.passage mark'].flatMap(q => (r => [r.top, r.bottom])("
        "document.querySelector(q).getBoundingClientRect()))"
    )
    top, bottom, mark_top, mark_bottom = driver.execute_script(bounds)
    assert top <= mark_top and mark_bottom <= bottom


def test_the_page_never_scrolls_sideways(driver, hostile_page, long_run_page):
    for path in (hostile_page, long_run_page):
        for width in (1280, 390, 320):
            open_page(driver, path, width)
            wide = driver.execute_script("return document.documentElement.scrollWidth")
            assert wide <= width


def test_hostile_tokens_show_literally_and_run_nothing(driver, hostile_page):
    open_page(driver, hostile_page)
    first = find(driver, "article.event")[0]
    shown = [e.get_property("textContent") for e in first.find_elements("css selector", "[data-p]")]
    assert shown == VISIBLE
    assert find(driver, "img") == []
    assert driver.execute_script("return typeof alert") == "function"


def test_shading_follows_the_measure_chosen(driver, hostile_page):
    open_page(driver, hostile_page)
    article = find(driver, "article.event")[0]

    def background():
        token = article.find_element("css selector", '[data-p="3"]')
        return token.value_of_css_property("background-color")

    by_share = background()
    for name in ("coefficient", "ratio", "advantage", "entropy", "gap"):
        radio = article.find_element("css selector", f'.measures input[value="{name}"]')
        driver.execute_script("arguments[0].click()", radio)
        low = article.find_element("css selector", ".legend .low").text
        assert low == radio.get_attribute("data-low")
        if name == "coefficient":
            assert background() != by_share  # it is negative: the other colour
    driver.execute_script("arguments[0].click()", find(driver, ".measures input[value=share]")[0])
    assert background() == by_share


def test_pointing_at_a_token_shows_its_record(driver, hostile_page):
    open_page(driver, hostile_page)
    article = find(driver, "article.event")[0]
    token = article.find_element("css selector", '[data-p="4"]')
    from selenium.webdriver import ActionChains

    ActionChains(driver).scroll_to_element(token).move_to_element(token).perform()
    record = article.find_element("css selector", ".record")
    assert record.find_element("css selector", "h4").text == VISIBLE[4]
    assert "advantage\n0.5" in record.text


def test_arrows_walk_the_tokens_and_c_goes_to_the_culprit(driver, hostile_page):
    from selenium.webdriver import Keys

    open_page(driver, hostile_page)
    article = find(driver, "article.event")[0]
    article.find_element("css selector", ".tokens").send_keys(Keys.ARROW_RIGHT)
    position = "return document.activeElement.dataset.p"
    assert driver.execute_script(position) == "0"
    driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert driver.execute_script(position) == "1"
    driver.switch_to.active_element.send_keys("c")
    assert driver.execute_script(position) == "3"
    assert "A culprit." in article.find_element("css selector", ".record").text
    driver.switch_to.active_element.send_keys(Keys.END)
    assert driver.execute_script(position) == str(len(HOSTILE) - 1)


def test_a_fold_opens_by_windows_and_closes(driver, hostile_page):
    open_page(driver, hostile_page)
    article = find(driver, "article.event")[1]
    fold = article.find_elements("css selector", ".fold")[0]
    label = fold.text
    count = len(article.find_elements("css selector", "[data-p]"))
    driver.execute_script("arguments[0].click()", fold)
    assert len(article.find_elements("css selector", "[data-p]")) == count + 400
    assert fold.get_attribute("aria-expanded") == "true"
    places = [int(e.get_attribute("data-p")) for e in article.find_elements("css selector", "[data-p]")]
    assert places == sorted(places)
    while fold.get_attribute("aria-expanded") == "true":
        driver.execute_script("arguments[0].click()", fold)
    assert fold.text == label
    assert len(article.find_elements("css selector", "[data-p]")) == count


def test_sections_fold_and_the_theme_changes(driver, hostile_page):
    open_page(driver, hostile_page)
    section = find(driver, "article.event details")[0]
    assert section.get_attribute("open") is not None
    section.find_element("css selector", "summary").click()
    assert section.get_attribute("open") is None
    body = find(driver, "body")[0]
    before = body.value_of_css_property("background-color")
    find(driver, "#theme")[0].click()
    assert body.value_of_css_property("background-color") != before


def test_the_list_sorts_and_pages(driver, long_run_page):
    open_page(driver, long_run_page)

    def norms():
        rows = find(driver, "#events tbody tr")
        return [float(row.find_elements("css selector", "td")[2].text) for row in rows]

    assert len(norms()) == 50
    head = find(driver, "#events th")[2]
    head.find_element("css selector", "button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert norms() == sorted(norms(), reverse=True)
    assert norms()[0] == 160.0
    head.find_element("css selector", "button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert norms()[0] == 60.0
    driver.execute_script("arguments[0].click()", find(driver, "#more-events")[0])
    assert len(norms()) == 100


def test_the_list_is_searched_and_filtered(driver, largest_page):
    open_page(driver, largest_page[0])
    search = find(driver, "#search")[0]
    search.send_keys("t1234x5")
    assert [row.text.split()[0] for row in find(driver, "#events tbody tr")] == ["1234"]
    assert find(driver, "#num-found")[0].text == "1 of 2,000 events"
    search.clear()
    search.send_keys("extreme step 77")
    assert len(find(driver, "#events tbody tr")) > 1
    search.clear()
    search.send_keys("no such token")
    assert find(driver, "#num-found")[0].text == "0 of 2,000 events"


def test_an_event_opens_from_the_list_the_curve_and_the_address(driver, long_run_page):
    open_page(driver, long_run_page, fragment="#event-step000042-epoch0-mini0")
    opened(driver, 42)
    driver.execute_script("arguments[0].click()", find(driver, "#events tbody a")[6])
    opened(driver, 7)
    assert len(find(driver, "#stage article")) == 1
    mark = find(driver, ".u-over .mark")[0]
    step = int(mark.get_attribute("aria-label").split()[-1])
    driver.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", mark)
    opened(driver, step)


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
    assert {"mean of the step", "threshold", "critic/score/mean"} <= {
        " ".join(key.text.split()[:-1]) for key in find(driver, ".key")
    }
    whole = find(driver, ".whole")[0]
    assert not whole.is_displayed()
    dragged = ActionChains(driver).move_to_element_with_offset(plot, -200, 0).click_and_hold()
    dragged.move_by_offset(75, 0).move_by_offset(75, 0).release().perform()
    assert whole.is_displayed()
    shown = "return document.querySelectorAll('.u-over .mark:not([hidden])').length"
    assert 10 < driver.execute_script(shown) < 60
    assert driver.execute_script("return getSelection().isCollapsed")
    width = plot.size["width"]
    for place in range(20):
        ActionChains(driver).move_to_element_with_offset(plot, int((place / 19 - 0.5) * (width - 4)), 30).perform()
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
    assert plain.startswith("### One token made the step-5 spike") and "20+40" not in plain and "```sh" in plain
    find(driver, ".with-text")[0].click()
    wait(driver, "return document.querySelector('.copy.issue').textContent === 'Copy as an issue'")
    button.click()
    wait(driver, "return document.querySelector('.copy.issue').textContent === 'Copied'")
    told = driver.execute_async_script(read)
    assert told.startswith(plain) and "so the answer⟦ is⟧ 60." in told


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


@pytest.mark.skipif(AXE is None, reason="axe-core is not here: npm pack axe-core, and name its axe.min.js in AXE_CORE")
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_axe_finds_nothing(driver, demo_page, long_run_page, hostile_page, width, is_dark):
    for path in (demo_page, long_run_page, hostile_page):
        assert axe(driver, path, width, is_dark) == []


def test_a_token_is_found_also_where_it_is_folded(driver, hostile_page):
    from selenium.webdriver import Keys

    open_page(driver, hostile_page)
    field = find(driver, "article.event .find")[1]
    field.send_keys("w2500", Keys.ENTER)
    assert "w2500" in find(driver, "article.event .record h4")[1].text
    field.clear()
    field.send_keys("nowhere", Keys.ENTER)
    assert field.get_attribute("aria-invalid") == "true"


def test_two_thousand_events_are_found_walked_and_copied(driver, largest_page):
    path, seconds = largest_page
    assert seconds < 20
    assert path.stat().st_size < 2_000_000
    start = time.monotonic()
    open_page(driver, path)
    opened(driver, 501)
    took = time.monotonic() - start
    assert took < 10, f"it took {took:.1f} s to open (3 on a quiet machine)"
    press(driver, "/")
    driver.switch_to.active_element.send_keys("t501x7", "\n")
    opened(driver, 501)
    find(driver, "#search")[0].clear()
    driver.execute_script("document.getElementById('search').dispatchEvent(new Event('input', {bubbles: true}))")
    for key, step in (("j", 502), ("j", 503), ("k", 502)):
        press(driver, key)
        opened(driver, step)
    assert "gradloc-report show" in find(driver, "#stage .copyline")[0].text
    grant = {"permission": {"name": "clipboard-write"}, "setting": "granted"}
    driver.execute_cdp_cmd("Browser.setPermission", grant)
    press(driver, "y")
    wait(driver, "return document.querySelector('.todo .copy').textContent === 'Copied'")
    press(driver, "?")
    assert find(driver, "#help")[0].is_displayed()
    press(driver, "\ue00c")
    assert not find(driver, "#help")[0].is_displayed()
    assert driver.get_log("browser") == []
    asked = [url for url in requests(driver) if not url.startswith(("data:", "about:"))]
    assert asked == [path.resolve().as_uri()]


def test_the_live_page_shows_what_comes_and_stays_where_the_reader_is(driver, tmp_path):
    folder = write_run(tmp_path, [make_event(5)], metrics=make_metrics(20))
    follower = Follower(folder)
    follower.poll()
    driver.get_log("browser")
    with Site(follower, 0) as site:
        threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        driver.get(site.url)
        inside = "document.querySelector('iframe').contentWindow"
        wait(driver, f"return {inside}.document.querySelector('h1')?.textContent === 'One token made the step-5 spike'")
        driver.execute_script(f"{inside}.scrollTo({{top: 400, behavior: 'instant'}})")
        worse = make_event(9, trigger=make_event()["trigger"] | {"grad_norm": 1e6})
        with (folder / "gradloc" / "events.jsonl").open("a") as file:
            file.write(json.dumps(worse) + "\n")
        follower.poll()
        wait(driver, f"return {inside}.document.querySelector('h1')?.textContent === 'One token made the step-9 spike'")
        wait(driver, f"return Math.abs({inside}.scrollY - 400) < 60")  # the browser keeps the words in sight
        assert driver.get_log("browser") == []
        site.shutdown()
    wait(driver, "return document.title.endsWith('(stopped)')")


def test_two_thousand_events_and_32k_tokens_stay_light(driver, largest_page):
    open_page(driver, largest_page[0], fragment="#event-step000501-epoch0-mini0")
    opened(driver, 501)
    count = "return document.getElementsByTagName('*').length"
    assert driver.execute_script(count) < 20_000
    for fold in find(driver, "#stage .fold"):
        for _ in range(6):
            driver.execute_script("arguments[0].click()", fold)
    assert driver.execute_script(count) < 20_000
    assert driver.get_log("browser") == []
    slowest = min(driver.execute_async_script(SCROLL) for _ in range(3))  # whatever else the machine does
    assert slowest < 250, f"one frame took {slowest:.0f} ms"


SCROLL = """
const done = arguments[arguments.length - 1];
let last = performance.now(), worst = 0, count = 0;
scrollTo(0, 0);
const step = (now) => {
  worst = Math.max(worst, now - last);
  last = now;
  scrollBy(0, 200);
  count += 1;
  if (count < 60) requestAnimationFrame(step); else done(worst);
};
requestAnimationFrame((now) => { last = now; requestAnimationFrame(step); });
"""
