# SPDX-License-Identifier: Apache-2.0
"""The pages tell the truth: links lead somewhere, commands, options and keys exist; a site can be made of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import make_advice
from tests.repo_checks.test_words import PAGES, without_code

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_every_link_to_a_file_leads_somewhere():
    for page in PAGES:
        targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
        assert [to for to in targets if "://" not in to and not (page.parent / to).exists()] == [], page.name


def test_the_advice_is_what_its_script_makes():
    for path, text in make_advice.pages().items():
        assert path.read_text(encoding="utf-8") == text, "run python scripts/make_advice.py"


def help_of(*command):
    done = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def commands(page):
    """Indented lines without comments and continuations, and what stands between backticks."""
    text = page.read_text()
    yield from re.findall(r"`([^`\n]+)`", text)
    for line in text.splitlines():
        if line.startswith("    "):
            yield line.split("  #")[0].split(" # ")[0].strip().rstrip("\\").strip()


TOOLS = {
    "apply_patch.py": (sys.executable, "apply_patch.py"),
    "make_patch.sh": ("bash", "make_patch.sh"),
    "run_experiment.sh": ("bash", "run_experiment.sh"),
    "gradloc": (sys.executable, "-m", "gradloc.report", "report"),
    "gradloc replay": (sys.executable, "-m", "gradloc.replay"),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_every_option_in_the_readme_is_one_of_the_tools(tool):
    said = help_of(*TOOLS[tool])
    is_called = re.compile(rf"(?<!\S)(?:\./)?{re.escape(tool)}(?!\S)(?! replay)")
    lines = [line for page in PAGES[:2] for line in commands(page) if is_called.search(line)]
    assert lines, f"the README does not show {tool}"
    for line in lines:
        for option in re.findall(r"(?<!\S)(--?[a-z][a-z-]*)", is_called.split(line, maxsplit=1)[1]):
            assert option in said, f"{option} in: {line}"


def test_the_make_targets_in_the_readme_exist():
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    lines = [line for page in PAGES[:2] for line in commands(page) if line.startswith("make ")]
    assert {line.split()[1] for line in lines} <= set(targets) and lines


def test_the_experiments_on_the_pages_are_listed():
    listed = subprocess.run(
        ["bash", "run_experiment.sh", "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    named = {
        name for page in PAGES for name in re.findall(r"run_experiment\.sh ([a-z][\w-]*)", page.read_text("utf-8"))
    }
    assert len(named) > 10 and named <= set(re.findall(r"^ *([\w-]+)", listed, re.M))


def test_the_keys_in_the_readme_are_documented():
    documented = (ROOT / "docs" / "configuration.md").read_text()
    keys = re.findall(r"actor_rollout_ref\.actor\.([a-z_.]+)=", (ROOT / "README.md").read_text())
    assert keys
    for key in keys:
        assert f"`{key}`" in documented, key


def test_no_file_names_a_path_of_one_machine():
    pattern, mine = r"/(work|root|opt|farm)/[a-z]", Path(__file__).relative_to(ROOT)
    found = subprocess.run(
        ["git", "grep", "-anoE", pattern, "--", ":!*.png", ":!*.safetensors", f":!{mine}"],
        cwd=ROOT, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if found.returncode > 1:
        pytest.skip("not a git checkout")
    assert found.stdout == ""


# ---- what the site needs of them, without mkdocs


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
