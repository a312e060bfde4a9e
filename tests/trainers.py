# SPDX-License-Identifier: Apache-2.0
"""The trainer that this environment has, and what of the tests for all of them it has nothing to show.

tests/adapters/same, and what scripts/test.sh names beside it, run by the same code on each: on verl 0.7's actor, on
verl 0.9's engine (`scripts/test.sh verl09`), and in part on TRL's trainer under DDP (`scripts/test.sh trl`).
"""

import importlib.metadata
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from experiments.cpu.environment import DEFAULT_VERL

ROOT = Path(__file__).resolve().parent.parent
OF_VERL07 = "verl 0.7"


def _installed() -> tuple[str, str]:
    """The trainer and its version; verl 0.7 is none that is installed: GRADLOC_TEST_VERL names it."""
    if find_spec("trl"):
        return "TRL", importlib.metadata.version("trl")
    try:
        version = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if version.startswith("0.9."):
        return "verl 0.9", version
    return OF_VERL07, os.environ.get("GRADLOC_TEST_VERL", DEFAULT_VERL)


TRAINER, VERSION = _installed()
SHARED = ("adapters/same/", "analysis/", "reweighting/", "stabilize/")
"""The rooms with tests for several trainers."""
PRELOADED = {
    "TRL": ("trl", "gradloc.trl"),
    "verl 0.9": ("verl.workers.engine_workers", "verl.trainer.ppo.v1", "transfer_queue"),
}
"""Where a trainer is installed, most of a rank's start is importing it."""
SETTINGS: dict[str, Any] = {"preloaded": PRELOADED.get(TRAINER, ()), "timeout_s": 300 if TRAINER == "verl 0.9" else 120}
"""Of a world there: the installed one, with ours or without. Without a flag it takes its own classes."""

# ---- verl 0.7: on every verl that there is a patch for

_PATCHES = json.loads((ROOT / "patches" / "manifest.json").read_text())["patches"]
_VERLS = [patch["base"].removeprefix("v") for patch in _PATCHES]
_ON_ALL = ("test_localization", "test_layouts", "layouts.test_experts", "layouts.test_ulysses")
ON_ALL = {"tests.adapters.verl07.test_harmless", *(f"tests.adapters.same.{name}" for name in _ON_ALL)}
"""Modules that are repeated for each; GRADLOC_TEST_VERL has any test run on one."""
ALSO_ON_09 = {"test_cures", "test_experts", "test_ulysses"}
"""Of these, verl 0.9 runs all by default, and the default tests on 0.7 some."""
ON_07 = {"pushed down", "rewards, divided", "advantage of a row, GSPO", "veto"}
"""Of these modules' cases."""

NOT_HERE = {
    "verl 0.9": {
        "and_not_with_an_analysis": "the schedule is that of verl 0.7's worker",
        "the_page_shows_these_distances": "the page shows those of verl 0.7's loss",
        "[fused, FSDP2": "verl 0.9.1 itself fails: FSDP2 shards an untied head apart, and the kernel takes its weight",
        "stages_are_told_apart": "verl 0.9's trainer has reduced the metrics of each update: test_parity.py",
        "[padding": "verl 0.9's batches have no padding",
        "-padding]": "verl 0.9's batches have no padding",
    },
    "TRL": {
        "spike_that_nobody_edited": "TRL's KL estimate, k3, has a small gradient where the reference excludes a token",
        "bypass_mode": "verl's",
        "a_user_registered": "verl's registry; a subclass of TRL's is in test_step.py",
        "under_every_loss": "verl's losses; TRL's are in test_step.py",
        "runs_its_row_alone": "TRL's forward of a micro-batch comes whole",
        "random_numbers_would_be_others": "TRL's forward of a micro-batch comes whole",
        "so_they_do_with_every_mean": "verl's losses; TRL's are in test_step.py",
        "FSDP1": "TRL's FSDP2 is in test_ranks.py",
        "[FSDP2-": "TRL's FSDP2 is in test_ranks.py",
        "weights kept": "a setting of FSDP's",
        "entropy and KL": "KL is verl's k2",
        "fsdp": "a strategy of verl's",
        "two_replicas_of_two_shards": "under DDP every process is a replica",
        "[padding]": "TRL gives padding no log-prob, and nothing flows back through it",
        "instead_of_hanging[loss]": "DDP's forward has no collective: peers hear of it and go on, see test_ranks.py",
        "[experts": "these add to logits, which TRL never has: routers are in test_step.py",
        "nothing_is_communicated": "every process is a trainer: two small messages a step",
        "trouble_with_telling": "the driver's, the same on every trainer, which here is on the first process alone",
        "resuming_from_a_checkpoint": "test_trainer.py has TRL's checkpoints",
        "verls_own_format": "test_trainer.py has TRL's",
        "[reference, mse": "TRL's KL has one estimator, k3",
        "[reference, kl]": "TRL's KL has one estimator, k3",
        "[reference, kl-": "TRL's KL has one estimator, k3",
        "skip_takes_no_step_at_all": "test_actions.py has TRL's",
        "fill_a_batch_up": "a rollout correction is verl's",
        "driver_tells_of_advantages": "test_trainer.py has what TRL's rows hold of them",
        "abort_stops_the_run": "test_actions.py and test_ranks.py have TRL's",
    },
}
"""Part of a test's name, and why there is nothing to test on this trainer, or where it is tested."""
BY_DEFAULT: dict[str, dict[str, tuple[str, ...]]] = {
    "verl 0.9": {
        "run_with_it[": ("[pushed down]", "[reference, kl]"),
        "setting_takes_bit_for_bit": ("[float32-pushed down]",),
        "found_and_nothing_else[": ("weights kept after forward by auto]", "FSDP1, original parameters by auto]"),
        "never_reaches_training": ("[file in the way",),  # trouble with telling is not the engine's
        "under_every_loss": ("[cispo]",),
        "add_up_however_they_are_grouped": ("[FSDP1]", "[FSDP2, entropy and KL]"),
        "runs_its_row_alone": ("[FSDP1]", "[FSDP2, bf16]"),
        "random_numbers_would_be_others": ("[FSDP2]",),
        "without_the_culprits_bit_for_bit": ("[dropout-",),
        "healthy_twins": (),
        "from_the_cap_to_its_end": (),
        "each_masked_step_says": (),
        "parts_of_unequal_buckets": ("[seq-mean-token-mean]",),
        "parts_add_up_whatever_the_policy_loss": ("[clip_cov]",),
        "however_the_batch_is_sharded_and_cut": ("[fsdp1]", "[dynamic micro-batches]"),
        "the_gradient_that_training_takes": ("[seq-mean-token-mean]",),
        "the_batch_is_cut_and_whatever_the_loss": ("[dynamic, fsdp1]", "[clip_cov]"),
        "every_token_on_a_plain_model": ("[entropy and kl terms]",),
        "all_other_tokens_leaves": ("[fsdp2-quantile]", "[fsdp-range]"),
        "literal_copy_of_model_and_optimizer": ("[2-fsdp2]",),
        "with_tried_updates_is_bit_identical": ("[fsdp1]", "[dynamic]", "[adapters]"),
        "before_its_first_step": ("[fsdp2]",),
        "at_frozen_weights": ("[FSDP1, KL]", "[entropy and KL]"),
        "clipped_by_plain_loops": ("[FSDP2 by kind-", "[FSDP1 with original parameters, by tensor-"),
        "keep_their_direction_and_size": ("[FSDP2 by kind-", "[FSDP1 with original parameters, by tensor-"),
        "weights_and_moments_as_they_were": ("[FSDP1]", "[fp16]"),
        "teaches_nothing_and_is_counted": ("[FSDP1]",),
        "a_stabilized_run_as_it_would": ("[FSDP2]",),
        "goes_on_bit_by_bit": ("[FSDP2, z-score, two mini-batches]", "[FSDP1, adagc, localization, too]"),
        "times_the_slow_weights": (
            "[both-FSDP2]",
            "[seq_clip masks on both sides-FSDP1]",
            "[token_clip masks above-FSDP2]",
        ),
        "through_the_clips": ("[FSDP1]", "[FSDP2, bisect]"),
    },
}
"""Part of a test's name, and those of its cases that are default tests on this trainer; verl 0.7 has the others."""
ON_0_7_1 = {
    "test_switched_off_it_is_unpatched_verl_bit_for_bit": ("one mini-batch]", "FSDP1, two mini-batches, two epochs]"),
    "test_observing_a_spike_leaves_the_run_as_it_would_have_been": ("-FSDP1, two mini-batches, two epochs-auto]",),
    "test_planted_culprits_and_nothing_else_are_named": ("-two culprits on two ranks, two micro-batches]",),
}
"""Tests that by default run on a verl beyond the first, too: that it trains as unpatched, and that two are named."""


def repeat_for_each_verl(metafunc: pytest.Metafunc) -> None:
    """Repeat the modules of ON_ALL for each patched verl."""
    is_chosen = TRAINER != OF_VERL07 or "GRADLOC_TEST_VERL" in os.environ
    if "verl_version" in metafunc.fixturenames and metafunc.module.__name__ in ON_ALL and not is_chosen:
        metafunc.parametrize("verl_version", _VERLS, indirect=True, scope="session")


def mark(item: pytest.Item) -> None:
    """Mark what this trainer has nothing of, and what by default another one has."""
    if TRAINER == OF_VERL07:
        _mark_on_07(item)
    elif item.path.relative_to(ROOT / "tests").as_posix().startswith(SHARED):
        for name, reason in NOT_HERE[TRAINER].items():
            if name in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))
        if _is_default_on(TRAINER, item) is False:
            item.add_marker(pytest.mark.slow)


def _is_default_on(trainer: str, item: pytest.Item) -> bool | None:
    """Whether a case is one of that trainer's default tests; None where the trainers do not share its cases out."""
    for name, cases in BY_DEFAULT.get(trainer, {}).items():
        if name in item.name:
            return any(case in item.name for case in cases)
    return None


def _mark_on_07(item: pytest.Item) -> None:
    """Of what verl 0.9 runs as well, the default tests have some here; and of a verl beyond the first ON_0_7_1."""
    module = item.module.__name__
    given = getattr(item, "callspec", None) and item.callspec.params or {}
    is_chosen = "GRADLOC_TEST_VERL" in os.environ
    is_also_on_09 = module.startswith("tests.adapters.same.") and module.rpartition(".")[2] in ALSO_ON_09
    if is_also_on_09 and not is_chosen and {"kind", "name", "layout"} & set(given):
        values = {value for value in given.values() if isinstance(value, str)}
        if not values & ON_07:
            item.add_marker(pytest.mark.slow)
    if not is_chosen and _is_default_on("verl 0.9", item):
        item.add_marker(pytest.mark.slow)
    is_default = item.name.endswith(ON_0_7_1.get(item.originalname, ()))
    if given.get("verl_version", VERSION) != VERSION and not is_default:
        item.add_marker(pytest.mark.slow)
