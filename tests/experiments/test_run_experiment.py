# SPDX-License-Identifier: Apache-2.0
"""run_experiment.sh as a user meets it, up to the point where the trainer would start."""

import os
import shutil
import subprocess
import sys

import pytest

from lab.experiments import catalog, target
from lab.experiments.errors import ExperimentError
from patchkit import tree
from patchkit.refusal import Refusal
from tests.experiments.conftest import REPO

pytestmark = pytest.mark.full

PUBLISHED = ("MODEL_PATH", "TRAIN_FILE", "CKPTS_DIR")


def one_sentence(done, code):
    """The refusal, after checking that it is one: exit code, prefix, no traceback."""
    assert done.returncode == code, done.stderr + done.stdout
    assert done.stderr.startswith("run_experiment.sh: ") and "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture
def published(tmp_path):
    """Variables that the published experiment accepts."""
    for name in ("model", "ckpts"):
        (tmp_path / name).mkdir()
    (tmp_path / "train file.parquet").touch()
    return {
        "MODEL_PATH": tmp_path / "model",
        "TRAIN_FILE": tmp_path / "train file.parquet",
        "CKPTS_DIR": tmp_path / "ckpts",
    }


def test_help_explains_arguments_and_variables_and_list_names_every_experiment(run_experiment):
    done = run_experiment("--help")
    assert done.returncode == 0
    for word in ("--list", "--dry-run", "key=value", "VERL_REPO", "PYTHON", "RUN_DIR"):
        assert word in done.stdout
    done = run_experiment("--list")
    assert done.returncode == 0
    for name in catalog.EXPERIMENTS:
        assert f"{name}: " in done.stdout
    for variable in PUBLISHED:
        assert variable in done.stdout


def test_with_no_name_the_published_experiment_runs_once_its_variables_are_set(run_experiment, published, patched_tree):
    said = one_sentence(run_experiment(), 2)
    assert "demo" in said and all(variable in said for variable in PUBLISHED)
    done = run_experiment("--dry-run", VERL_REPO=patched_tree, **published)
    assert done.returncode == 0, done.stderr
    assert "--config-name gradloc-qwen3-4b" in done.stdout
    said = one_sentence(run_experiment(catalog.PUBLISHED.name, **{**published, "TRAIN_FILE": "/no/such/place"}), 1)
    assert "TRAIN_FILE=/no/such/place does not exist" in said


def test_a_dry_run_prints_target_command_and_results_and_leaves_nothing(run_experiment, patched_tree, tmp_path):
    done = run_experiment("demo", "seed=3", "--dry-run", "+a.b=[1,2]", VERL_REPO=patched_tree, RUN_DIR="my run")
    assert done.returncode == 0, done.stderr
    first, command, results = done.stdout.splitlines()
    assert first == f"verl:    {patched_tree.resolve()} (VERL_REPO)"
    assert "-m verl.trainer.main_ppo" in command and command.endswith("seed=3 '+a.b=[1,2]'")
    assert results.split(None, 1)[1] == str(tmp_path / "my run")
    assert list(tmp_path.iterdir()) == []
    done = run_experiment("demo", "--dry-run", cwd=patched_tree)
    assert done.stdout.startswith(f"verl:    {patched_tree.resolve()} (the current folder)")


@pytest.mark.parametrize(
    ("given", "variables", "shown"),
    [
        (["demo"], {}, ["(verl 0.7.0, the demo's own patched copy)"]),
        (["demo", "verl=0.7.0"], {}, ["(verl 0.7.0, the demo's own patched copy)", "--config-name demo seed=3\n"]),
        (
            ["demo", "verl=0.9.1"],
            {},
            [f"{REPO}/.gradloc/venv-verl09/bin/python -m verl", "--config-name demo-verl09 seed=3\n"],
        ),
        (["demo", "verl=0.9.1"], {"VERL09_PYTHON": "/a/python"}, ["command: /a/python -m verl.trainer.main_ppo"]),
        (
            ["demo", "trainer=trl", "gradloc=mask"],
            {"TRL_PYTHON": "/a/python"},
            ["torch.distributed.run --standalone --nproc-per-node=2 -m lab.experiments.trl.demo gradloc=mask"],
        ),
        (["demo", "trainer=loop"], {"LOOP_PYTHON": "/a/python"}, ["/a/python -m lab.experiments.loop.demo seed=3\n"]),
        (["pretrain"], {}, [f"{REPO}/.gradloc/venv/bin/python -m lab.experiments.loop.pretrain seed=3\n"]),
    ],
    ids=["usual", "0.7.0", "0.9.1", "its Python", "TRL", "a loop", "a loop of its own"],
)
def test_there_is_an_environment_for_each_trainer(run_experiment, tmp_path, given, variables, shown):
    done = run_experiment(*given, "seed=3", "--dry-run", **variables)
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in shown) and "verl=" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_an_unpatched_target_is_refused_with_the_command_that_patches_it(run_experiment, base_tree):
    said = one_sentence(run_experiment("demo", VERL_REPO=base_tree), 1)
    assert "is not patched (PRISTINE)" in said
    assert f"apply_patch.py --repo {base_tree.resolve()}" in said


def test_a_tree_that_no_patch_goes_on_is_refused_with_the_applier_s_own_way_out(run_experiment, patched_tree, tmp_path):
    edited = tmp_path / "verl"
    actor = "verl/workers/actor/dp_actor.py"
    ignore = shutil.ignore_patterns("*.pyc")
    shutil.copytree(patched_tree, edited, ignore=ignore)
    (edited / actor).write_text((edited / actor).read_text() + "# an edit\n")
    said = one_sentence(run_experiment("demo", VERL_REPO=edited), 1)
    assert "edited" in said and actor in said and "patch it with" not in said


def test_a_clone_called_verl_in_this_folder_is_no_installed_verl(tmp_path, monkeypatch):
    (tmp_path / "verl").mkdir()
    monkeypatch.setattr(target, "REPO", tmp_path)
    with pytest.raises(ExperimentError, match="no verl found"):
        target.imported(sys.executable)
    with monkeypatch.context() as patch, pytest.raises(Refusal, match="target-not-installed"):
        patch.delitem(sys.modules, "verl", raising=False)
        patch.setattr(sys, "path", [str(tmp_path)])
        tree.installed_root()


LOOP = ["demo", "trainer=loop"]


def slow(*case):
    """A slow case: another one makes the same kind of mistake."""
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("arguments", "variables", "code"),
    [
        (LOOP, {"LOOP_PYTHON": "/no/python"}, 1),
        slow(LOOP, {"LOOP_PYTHON": "/bin/false"}, 1),
        (["demo", "trainer=trl"], {"TRL_PYTHON": "/no/python"}, 1),
        (["demo", "verl=0.9.1"], {"VERL09_PYTHON": "/no/python"}, 1),
        slow(["gradloc-qwen3-4b", "verl=0.9.1", "--dry-run"], {"VERL09_PYTHON": "/no/python"}, 1),
        (LOOP, {"RUN_DIR": "/proc/no/run"}, 1),
        slow(LOOP, {"RUN_DIR": "/etc/passwd/run"}, 1),
        slow(LOOP, {"RUN_DIR": "a" * 300}, 1),
        (LOOP, {"RUN_DIR": "~no-such-user/run"}, 1),
        (["demo"], {"VERL_REPO": "~no-such-user/verl"}, 1),
        ([*LOOP, "seed=abc"], {}, 2),
        slow([*LOOP, "gradloc=bogus"], {}, 2),
        slow([*LOOP, "first_step=6", "last_step=3"], {}, 2),
        (["demo", "trainer=trl", "tau=0"], {}, 2),
        slow(["pretrain", "peak=1"], {}, 2),
        ([*LOOP, "--arms", "x", "--dry-run"], {}, 2),
        slow([*LOOP, "--seeds", "3", "--dry-run"], {}, 2),
    ],
    ids=lambda value: " ".join(map(str, value))[:60] if isinstance(value, list | dict) else "",
)
def test_a_mistake_is_one_sentence_and_leaves_no_folder(
    run_experiment, published, tmp_path, arguments, variables, code
):
    before = set(tmp_path.iterdir())
    given = {"LOOP_PYTHON": sys.executable, "TRL_PYTHON": sys.executable, "PYTHON": sys.executable, "RUN_DIR": "run"}
    one_sentence(run_experiment(*arguments, **published, **(given | variables)), code)
    assert set(tmp_path.iterdir()) == before


def test_an_interpreter_may_be_named_from_the_current_folder(run_experiment, tmp_path):
    (tmp_path / "python").symlink_to(sys.executable)
    done = run_experiment(*LOOP, "--dry-run", LOOP_PYTHON="./python")
    assert f"command: {tmp_path}/python -m" in done.stdout


def test_a_folder_that_is_no_verl_or_whose_packages_ray_would_prefer_is_refused(run_experiment, patched_tree, tmp_path):
    assert "is not verl" in one_sentence(run_experiment("demo", VERL_REPO=tmp_path), 1)
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").touch()
    said = one_sentence(run_experiment("demo", VERL_REPO=patched_tree), 1)
    assert "run this from another folder" in said


def test_a_python_without_verl_or_the_packages_is_refused(run_experiment, published, patched_tree, tmp_path):
    bare = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    published["PYTHON"] = bare / "bin" / "python"
    assert "no verl found" in one_sentence(run_experiment(catalog.PUBLISHED.name, **published), 1)
    lacks = "lacks torch, ray, hydra, vllm, math_verify"
    assert lacks in one_sentence(run_experiment(catalog.PUBLISHED.name, VERL_REPO=patched_tree, **published), 1)
    (site,) = bare.glob("lib/python*/site-packages")
    shutil.copytree(patched_tree / "verl", site / "verl")
    assert lacks in one_sentence(run_experiment(catalog.PUBLISHED.name, **published), 1)


ALONE = "is for the demo alone, as trainer=trl or loop and without verl=VERSION"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nonsense"], f"there are {', '.join(catalog.EXPERIMENTS)}"),
        (["demo", "second"], "'second' is not an override"),
        slow(["seed=3"], "name it first"),
        (["demo", "--no-such-option"], "--no-such-option"),
        (["demo", "verl=0.8.0"], "demo runs on verl 0.7.0 and 0.9.1, not on 0.8.0."),
        slow(["explosion", "verl=0.8.0"], "explosion runs on verl 0.7.0 and 0.9.1, not on 0.8.0."),
        (["demo", "trainer=openrlhf"], ALONE),
        slow(["wild", "trainer=trl"], ALONE),
        slow(["demo", "trainer=trl", "verl=0.9.1"], ALONE),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_call_is_answered_with_what_would_be_right(run_experiment, arguments, expected):
    done = run_experiment(*arguments)
    assert done.returncode == 2 and expected in done.stderr and "Traceback" not in done.stderr


def test_a_version_with_a_named_verl_and_an_existing_results_folder_are_refused(run_experiment, patched_tree, tmp_path):
    both = one_sentence(run_experiment("demo", "verl=0.7.0", "--dry-run", VERL_REPO=patched_tree), 2)
    assert "not for VERL_REPO" in both
    assert "exists" in one_sentence(run_experiment("demo", "--dry-run", VERL_REPO=patched_tree, RUN_DIR=tmp_path), 1)


def test_a_python_that_is_missing_or_is_none_is_one_sentence(run_experiment, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "env", "dirname"):
        os.symlink(shutil.which(tool), tools / tool)
    assert "no Python 3.10 or newer" in one_sentence(run_experiment("--list", PATH=tools), 1)
    assert "PYTHON=/no/python" in one_sentence(run_experiment("--list", PYTHON="/no/python"), 1)


def test_it_works_from_a_folder_with_spaces_and_through_a_link(run_experiment, tmp_path):
    copy = tmp_path / "a folder with spaces"
    kept_out = {str(REPO): [".git", ".gradloc", "runs"]}  # the package has a room called runs, too
    shutil.copytree(REPO, copy, ignore=lambda folder, _: [*kept_out.get(str(folder), ()), "__pycache__"])
    done = run_experiment("demo", "--dry-run", script=copy / "run_experiment.sh")
    assert done.returncode == 0, done.stderr
    assert f"'{copy}/lab/experiments'" in done.stdout
