# SPDX-License-Identifier: Apache-2.0
"""The workflows of the forge are valid, ask for what is here, and name no package registry."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(workflow: Path) -> list[dict]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    assert all({"runs-on", "timeout-minutes"} <= job.keys() for job in jobs if "make" in str(job))
    return [step for job in jobs for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_each_step_runs_a_command_or_a_pinned_action(workflow):
    for step in steps(workflow):
        assert ("run" in step) != ("uses" in step), step
        assert "uses" not in step or re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]), step


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_step_runs_of_ours_exists(workflow):
    said = "\n".join(step.get("run", "") for step in steps(workflow))
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert set(re.findall(r"\bmake ([a-z0-9-]+)", said)) <= targets
    for name in re.findall(r"[\w./]+\.(?:sh|py|json|txt)\b", said):
        assert (ROOT / name).exists(), name
    installed = re.findall(r"bin/(gradloc-[a-z]+)", said)
    assert all(f"\n{name} = " in (ROOT / "pyproject.toml").read_text() for name in installed)


def test_there_are_workflows_for_the_tests_and_for_a_release():
    assert [path.name for path in WORKFLOWS] == ["release.yml", "tests.yml"]
    assert {step["run"] for step in steps(WORKFLOWS[1]) if "run" in step} >= {"make lint", "make quick", "make test"}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_packages_come_from_where_pip_is_set_to_look(workflow):
    assert not re.search(r"index[-_]url|https?://", workflow.read_text(), flags=re.I)
