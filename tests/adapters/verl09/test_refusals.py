# SPDX-License-Identifier: Apache-2.0
"""A run that cannot work is refused at start, in one sentence; a verl that has changed is named."""

import re
import subprocess
import sys

import pytest

from tests.adapters.test_requirements import refusals
from tests.world import RankError

from .conftest import HARNESS

ACTOR = "actor_rollout_ref.actor"
ON = "+gradloc=on"
BUCKETS = "trainer.gradient_analysis_mode=true"
REFUSED = {
    **refusals("0.9", "all"),
    f"{BUCKETS} trainer.gradient_analysis_env_groups=4 trainer.v1.trainer_mode=colocate_async": (
        "env_groups must be null here \\(trainer.v1.trainer_mode=colocate_async rolls out"
    ),
    "trainer.quartile_analysis_mode=true trainer.quartile_analysis_every=0": "quartile_analysis_every must be",
    f"+{ACTOR}.gradloc.triger.tau=1": "did you mean actor_rollout_ref.actor.gradloc.trigger",
    "+trainer.heath.enable=true": "did you mean trainer.health",
}


@pytest.fixture(scope="module")
def said(world, model_dir):
    cases = [[ON, *override.split()] for override in REFUSED]
    return dict(zip(REFUSED, world.run(f"{HARNESS}.refusals", cases=cases, model_dir=str(model_dir))[0], strict=True))


@pytest.mark.parametrize("override", REFUSED)
def test_it_is_refused_before_any_worker_starts(said, override):
    assert re.search(REFUSED[override], said[override]), said[override]


def test_the_installed_verl_is_as_this_adapter_knows_it():
    code = (
        "import verl\n"
        "from gradloc.adapters.verl09.config import KNOWN, TOUCHED, changed_bodies\n"
        "from gradloc.private_api import differences\n"
        "assert verl.__version__ in KNOWN, verl.__version__\n"
        "assert [differences(TOUCHED[who]) for who in ('worker', 'trainer')] == [[], []]\n"
        "assert changed_bodies() == []"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


RELEASES = {
    None: (  # with a method that takes something else
        "verl 0.9.1 changed what gradloc hangs on (it knows 0.9.0, 0.9.1): verl.workers.engine.fsdp.transformer_impl:"
        "FSDPEngineWithLMHead.optimizer_step takes (self, closure), expected (self); install one of these, or leave "
        "+gradloc out."
    ),
    "0.8.0": "gradloc's plug-in is for verl 0.9, found verl 0.8.0: on 0.7.0 apply the patch",
    **dict.fromkeys(("0.9.0", "0.9.7", "0.10.0.dev0", "1.0.0"), "nothing"),
}


@pytest.mark.parametrize("release", RELEASES)
def test_what_decides_is_what_is_touched_and_not_the_releases_name(world, release):
    assert world.run(f"{HARNESS}.with_verl", release=release)[0].startswith(RELEASES[release])


def test_code_that_does_something_else_is_a_warning_that_names_it(world):
    said = world.run(f"{HARNESS}.warned_of_a_changed_body")[0]
    assert said.startswith("gradloc: verl 0.9.1 changed the code of PPOTrainer._update_actor, which gradloc knows of")
    assert said.count("PPOTrainer.") == 1


def test_a_plug_in_that_was_not_loaded_is_missed(world, model_dir):
    with pytest.raises(RankError, match="gradloc is switched on, and its plug-in was not loaded"):
        world.run(f"{HARNESS}.train_without_plug_in", model_dir=str(model_dir))
