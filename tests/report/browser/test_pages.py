# SPDX-License-Identifier: Apache-2.0
"""The report in a real browser: it is quiet, reaches for nothing, and its controls work.

Run with `pytest -m browser tests/report`. Where there is no Chromium, the tests are skipped and say so.
"""

import json
import threading
import time

import pytest

from gradloc.report.commands.watch import Follower, Site
from tests.report.browser.driving import find, open_page, opened, press, requests, shots, wait, written
from tests.report.builder import HOSTILE, VISIBLE, make_culprit, make_event, make_metrics, write_run
from tests.report.events import event, searched

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("name", ["demo_page", "hostile_page", "long_run_page", "log_page", "mismatch_page"])
@pytest.mark.parametrize("width", [1280, 390, 320])
def test_the_page_is_quiet_requests_only_itself_and_never_scrolls_sideways(driver, request, name, width):
    path = request.getfixturevalue(name)
    open_page(driver, path, width)
    assert [entry["message"] for entry in driver.get_log("browser")] == []
    asked = [url for url in requests(driver) if not url.startswith(("data:", "about:"))]
    assert asked == [path.resolve().as_uri()]
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width


BOTTOM = """
const parts = document.querySelectorAll('.hero .headline, .hero .figures, .hero .card, .hero .todo .copy');
return [parts.length, Math.max(...[...parts].map((part) => part.getBoundingClientRect().bottom))];
"""


def test_what_why_whether_it_hurt_and_what_now_are_on_the_first_screen(driver, demo_page, long_run_page, tmp_path):
    pages = [demo_page, long_run_page]
    pages += [written(write_run(tmp_path / name, [event(f"searched: {name}")])) for name in searched()]
    for path in pages:
        shots.show(driver, path, 1440, 900, is_dark=False)
        num_parts, bottom = driver.execute_script(BOTTOM)
        assert num_parts == 5 and bottom <= 900, path
        shots.show(driver, path, 400, 850, is_dark=True)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 400, path


@pytest.mark.parametrize("width", [1440, 400])
def test_a_culprit_after_a_long_chat_is_in_sight(driver, tmp_path, width):
    chat = "".join(f"a turn of the chat, as long as they are: {i}\n" for i in range(12))
    answer = make_culprit(token="24 + 6 = 90", text_before=chat, text_after="\nand so on" * 9, span="sequence")
    shots.show(driver, written(write_run(tmp_path, [make_event(culprits=[answer])])), width, 900, is_dark=False)
    bounds = (
        "return ['.passage', '.passage mark'].flatMap(q => (r => [r.top, r.bottom])("
        "document.querySelector(q).getBoundingClientRect()))"
    )
    top, bottom, mark_top, mark_bottom = driver.execute_script(bounds)
    assert top <= mark_top and mark_bottom <= bottom


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
    assert "gradloc report" in find(driver, "#stage .copyline")[0].text
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
        worse = make_event(9, trigger={"grad_norm": 1e6})
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
