# SPDX-License-Identifier: Apache-2.0
"""docs/applier.md names every option, state and exit code, and no other."""

import re
from pathlib import Path

import pytest

from patchkit.apply import cli
from patchkit.build import cli as regenerate
from patchkit.errors import PatchkitError
from patchkit.patch.manifest import parse
from patchkit.tree.survey import State
from scripts import applier_transcript

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/applier.md").read_text()


def options(parser) -> set[str]:
    """The options that a parser's help shows."""
    return {
        name
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and action.help != "==SUPPRESS=="
    } - {"--help"}


def test_every_option_is_on_the_page_and_every_option_of_the_page_exists():
    known = options(cli.parser()) | options(regenerate.parser())
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", PAGE))
    assert named <= known, named - known
    assert options(cli.parser()) <= named
    assert options(regenerate.parser()) - {"--debug"} <= named


def test_every_state_has_its_row():
    for state in [*State.__members__, "NOT_VERL"]:
        assert f"\n| `{state}` |" in PAGE


def test_every_exit_code_has_its_row():
    rows = {int(code) for code in re.findall(r"^\| (\d) \|", PAGE, flags=re.M)}
    assert rows == {0} | {kind.exit_code for kind in PatchkitError.__subclasses__()}


def test_one_place_names_the_version():
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "gradloc/__init__.py").read_text(), flags=re.M)[1]
    assert parse((ROOT / "patches/manifest.json").read_bytes()).version == version
    for path in (*ROOT.glob("patchkit/**/*.py"), *ROOT.glob("gradloc/report/**/*.py"), ROOT / "pyproject.toml"):
        assert f'"{version}"' not in path.read_text(), path


def test_the_script_of_make_patch_shows_its_own_options():
    head = (ROOT / "make_patch.sh").read_text()
    for option in set(re.findall(r"--[a-z-]+", head)) - {"--help"}:
        assert option in options(regenerate.parser())


@pytest.mark.full
def test_the_transcript_is_what_the_commands_print(tmp_path):
    page = applier_transcript.transcript(tmp_path)
    assert not re.search(r"/(tmp|home|root|work|opt|Users)/", page)
    assert page == (ROOT / "docs/applier-transcript.md").read_text(), "make it anew: scripts/applier_transcript.py"


def test_the_applier_and_the_builder_stay_small():
    said = int(re.search(r"they have under ([\d,]+) lines\.", PAGE)[1].replace(",", ""))
    assert sum(len(path.read_text().splitlines()) for path in ROOT.glob("patchkit/**/*.py")) < said
