# SPDX-License-Identifier: Apache-2.0
"""verl's own gates hold on the patched tree for every file that the patch touches or adds; and a patch is short."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOLDERS = ("Copyright 2024 Bytedance", "Copyright 2025 Bytedance", "Copyright 2025 Individual Contributor:")
HOLDERS += ("Copyright 2023-2024 SGLang Team", "Copyright 2025 ModelBest Inc.", "Copyright 2025 Meituan Ltd.")


def touched(suffix):
    """Files of the patch."""
    text = (ROOT / "patches" / "gradloc.patch").read_text()
    found = sorted(path for path in re.findall(r"(?m)^diff --git a/(\S+) b/", text) if path.endswith(suffix))
    assert found
    return found


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["lint", "format"])
def test_ruff_with_verls_own_settings_finds_nothing(patched_tree, command):
    files = [str(patched_tree / path) for path in touched(".py")]
    settings = ["--config", str(patched_tree / "pyproject.toml")]
    ruff = [sys.executable, "-m", "ruff", *command, *settings, *files]
    done = subprocess.run(ruff, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_file_has_a_licence_header_that_verl_accepts_and_says_that_it_was_modified(base_tree, patched_tree):
    for path in touched(".py"):
        text = (patched_tree / path).read_text()
        assert any(holder in text[:400] for holder in HOLDERS) and "Apache" in text[:400], path
        assert not (base_tree / path).exists() or re.search("# .*the GradLoc patch", text), path


def test_every_yaml_key_that_is_added_has_a_comment_above_and_a_blank_line_between(base_tree, patched_tree):
    for path in touched(".yaml"):
        old = base_tree / path
        before = set(old.read_text().splitlines()) if old.exists() else set()
        lines = (patched_tree / path).read_text().splitlines()
        for number, line in enumerate(lines):
            if line in before or not re.match(r"\s*[a-z_]+:", line):
                continue
            assert lines[number - 1].lstrip().startswith("#"), f"{path}:{number + 1} has no comment above"
            assert " #" not in line.split(":", 1)[1] or '"' in line, f"{path}:{number + 1} has one behind"


# ---- a patch that one reads in five minutes


def code_added(patch: Path) -> list[str]:
    """The lines that the patch adds to files of Python, without blank ones and comments."""
    found, is_python = [], False
    for line in patch.read_text(encoding="utf-8").splitlines():
        if line.startswith("+++ "):
            is_python = line.endswith(".py")
        elif line.startswith("+") and is_python and line[1:].strip() and not line[1:].lstrip().startswith("#"):
            found.append(line)
    return found


def test_the_patch_is_short_and_most_of_it_is_context():
    patch = ROOT / "patches" / "gradloc.patch"
    assert len(patch.read_text(encoding="utf-8").splitlines()) <= 450
    assert 50 < len(code_added(patch)) < 150
