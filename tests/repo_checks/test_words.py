# SPDX-License-Identifier: Apache-2.0
"""The pages are short, and so are their sentences: a bound that holds tomorrow's pages, too.

A word has a letter or a digit, so a table's bars are none. Code, which is run, and what a script makes do not count.
"""

import re
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_WORDS = 30_000  # of all pages, tables included
GENERATED = {"docs/advice.md"}  # made by a script, to be looked up
MAX_OF_A_SENTENCE, MAX_MEDIAN = 40, 17
FENCED = re.compile(r"^(\s*)```.*?^\1```$|^<!-- made by .*?^<!-- end -->$|^<!--.*?-->$", re.S | re.M)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n(?= {4}))+")
ITEM = re.compile(r"\s*([-*>]|\d+\.)\s+")
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|vs|et al|cf|Fig)\.")
END = re.compile(r"(?<=[.!?])[*_)\"]*\s+(?=[A-Z0-9`*\[(\"_])")


def without_code(text: str) -> str:
    return INDENTED.sub("", FENCED.sub("", text))


def paragraphs(text: str) -> list[str]:
    """A page's prose: without code, tables, headings and pictures; each item of a list by itself."""
    found, current = [], []
    for line in [*without_code(text).splitlines(), ""]:
        if not line.strip() or re.match(r"\s*(\||#|!\[|@)", line) or ITEM.match(line):
            found.append(" ".join(current))
            current = [ITEM.sub("", line, count=1)] if ITEM.match(line) else []
        else:
            current.append(line.strip())
    return [text for text in found if text]


def sentences(text: str) -> list[str]:
    """A page's sentences; a link counts as its text, code between backticks as one word."""
    found = []
    for paragraph in paragraphs(text):
        plain = re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", paragraph)
        plain = ABBREVIATIONS.sub(r"\1", re.sub(r"`[^`]+`", "`code`", plain))
        found += [sentence for sentence in END.split(plain) if words(sentence)]
    return found


def words(text: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_no_sentence_is_long_and_half_of_them_are_short():
    found = [sentence for page in PAGES for sentence in sentences(page.read_text(encoding="utf-8"))]
    assert [sentence for sentence in found if words(sentence) > MAX_OF_A_SENTENCE] == []
    assert median(map(words, found)) <= MAX_MEDIAN and len(found) > 1000


def test_all_pages_together_can_be_read():
    read = {str(page.relative_to(ROOT)): page for page in PAGES}
    counted = {name: words(without_code(page.read_text(encoding="utf-8"))) for name, page in read.items()}
    assert sum(counted[name] for name in counted.keys() - GENERATED) <= MAX_WORDS, counted
