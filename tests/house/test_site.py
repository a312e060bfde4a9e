# SPDX-License-Identifier: Apache-2.0
"""What the site needs of the pages, checked without mkdocs: every page has a place, every anchor its heading."""

import re
from pathlib import Path

from tests.house.test_words import without_code

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """A forge's anchors of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    headings = re.findall(r"^#{1,6} (.+)$", text, re.M)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def test_every_anchor_is_a_heading_of_its_page():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                found = anchors(page.parent / target if target else page)
                assert anchor in found, f"{page.name}: {target}#{anchor}"


def test_a_list_is_one_on_a_forge_and_on_the_site():
    """The site wants an empty line before a list, and four spaces where a forge nests by two: no list is nested."""
    for page in PAGES:
        above = ""
        for line in without_code(page.read_text(encoding="utf-8")).splitlines():
            item = re.match(r"( *)([-*]|\d+\.) ", line)
            is_one = not item or (not item[1] and (not above or re.match(r"  |[-*] |\d+\. ", above)))
            assert is_one, f"{page.name}: {line}"
            above = line.rstrip()


def test_the_index_has_a_place_for_every_page():
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", index, re.M) == ["Tutorial", "How-to", "Reference", "Explanation"]
    linked = set(re.findall(r"\]\(([\w-]+\.md)[)#]", index))
    assert linked == {page.name for page in DOCS.glob("*.md")} - {"README.md"}


def test_the_site_asks_nothing_of_other_hosts():
    """What `make docs` then looks for in the pages that it has made."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "strict: true" in settings and "font: false" in settings and "://" not in settings
