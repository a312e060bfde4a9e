# SPDX-License-Identifier: Apache-2.0
"""The trainer that this environment has, and what of the tests for all of them it has nothing to show.

tests/adapters/conformance, and what scripts/test.sh adds, run by the same code on each: on verl 0.7's actor, on
verl 0.9's engine (`scripts/test.sh verl09`), and in part on TRL's trainer under DDP (`scripts/test.sh trl`).
"""

import importlib.metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lab.experiments.environment import DEFAULT_VERL
from tests.world import PRELOADED

ROOT = Path(__file__).resolve().parent.parent
OF_VERL07 = "verl 0.7"


def _installed() -> tuple[str, str]:
    """Return the trainer and its version; verl 0.7 is none that is installed, but a patched copy."""
    if find_spec("trl"):
        return "TRL", importlib.metadata.version("trl")
    try:
        version = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if version.startswith("0.9."):
        return "verl 0.9", version
    return OF_VERL07, DEFAULT_VERL


TRAINER, VERSION = _installed()
SHARED = ("adapters/conformance/", "adapters/verl07/test_harmless.py", "analysis/", "reweighting/", "stabilize/")
"""The rooms with tests for several trainers."""
INSTALLED = {
    "TRL": ("trl", "gradloc.trl"),
    "verl 0.9": ("verl.workers.engine_workers", "verl.trainer.ppo.v1", "transfer_queue"),
}
"""Where a trainer is installed, most of a rank's start is importing it."""
SETTINGS: dict[str, Any] = {
    "preloaded": (*PRELOADED, *INSTALLED.get(TRAINER, ())),
    "timeout_s": 300 if TRAINER == "verl 0.9" else 120,
}
"""Of a world there: the installed one, with ours or without. Without a flag it takes its own classes."""

NOT_HERE = {
    "verl 0.9": {
        "and_not_with_an_analysis": "the schedule is that of verl 0.7's worker",
        "the_page_shows_these_distances": "the page shows those of verl 0.7's loss",
        "[fused, FSDP2": "verl 0.9.1 itself fails: FSDP2 shards an untied head apart, and the kernel takes its weight",
        "stages_are_told_apart": "verl 0.9's trainer has reduced the metrics of each update: test_parity.py",
        "[padding": "verl 0.9's batches have no padding",
    },
    "TRL": {
        "spike_that_nobody_edited": "TRL's KL estimate, k3, has a small gradient where the reference excludes a token",
        "bypass_mode": "verl's",
        "a_user_registered": "verl's registry; a subclass of TRL's is in test_step.py",
        "under_every_loss": "verl's losses; TRL's are in test_step.py",
        "runs_its_row_alone": "TRL's forward of a micro-batch comes whole",
        "random_numbers_would_be_others": "TRL's forward of a micro-batch comes whole",
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
EVERY = None
NONE: tuple[str, ...] = ()
ALL_OF: dict[tuple[tuple[str, ...] | None, tuple[str, ...] | None], str] = {
    (EVERY, NONE): """
cures::with_none_allowed failures::skip failures::the_weights_before failures::resuming failures::a_full_bundle
identities::nothing_is_communicated test_layouts::a_dynamic_batch test_layouts::a_spike_in_a_later
localization::a_rehearsal split::a_rank_without quartiles.test_actor::a_broken quartiles.test_actor::a_learning_rate
stages::alpha_0 stages::each_stage stabilize.test_actor::a_step_that
""",
    (NONE, EVERY): """
failures::abort failures::text experts::moving stages::reweighting stabilize.test_actor::a_step_without
stabilize.test_actor::a_run_under_safe
""",
    (NONE, NONE): """
cures::where_no_setting experts::masking kernels::masking ulysses::masking localization::the_verdict
trigger::a_collapse trigger::mask_and_skip trigger::the_page trigger::each_masked
""",
}
"""Rows of the next table whose cases are all alike: verl 0.7 has them, verl 0.9 has, or neither has any."""
BY_DEFAULT: dict[str, tuple[tuple[str, ...] | None, tuple[str, ...] | None]] = {
    "harmless::switched_off": (("two mini-batches, two epochs",), NONE),
    "harmless::observing": (("FSDP1-auto",), NONE),
    "actions::every_appearance": (("fsdp1",), ("fsdp2",)),
    "cures::the_norm_under": (NONE, ("pushed down",)),
    "cures::a_healed_step": (NONE, ("float32-pushed down",)),
    "cures::so_it_is_for_each": (NONE, ("veto",)),
    "cures::rows_that_only_fill": (NONE, ("veto",)),
    "failures::a_rank_that_fails_inside": (("loss",), ("forward",)),
    "failures::a_rank_that_fails_at": (("auto",), NONE),
    "failures::trouble": (("disk full",), NONE),
    "identities::the_probes": (("kl_cov",), NONE),
    "identities::the_shares": (("FSDP2, weights kept", "FSDP1, bf16"), ("FSDP2, entropy and KL",)),
    "identities::the_loss_asked_again": (NONE, ("bf16-on-policy",)),
    "identities::a_masked_step": (NONE, ("dropout-FSDP1",)),
    "identities::a_token_s_backward": (("FSDP2",), ("FSDP1",)),
    "identities::with_dropout": (("FSDP1",), NONE),
    "test_layouts::the_planted": (
        ("FSDP2, bf16, checkpointing by auto",),
        ("FSDP1, original parameters by auto", "FSDP2, LoRA by auto"),
    ),
    "test_layouts::what_half": (("FSDP2, reduced in bf16-100",), NONE),
    "test_layouts::hybrid": (NONE, ("FSDP2",)),
    "test_layouts::the_bound": (("-1.0-True",), ("1.0-False",)),
    "test_layouts::a_token_after_a_picture": (NONE, ("FSDP2",)),
    "test_layouts::a_return": (NONE, ("FSDP2",)),
    "experts::the_planted": (NONE, ("Qwen3-MoE, FSDP2",)),
    "kernels::the_planted": (("fused, FSDP1, bf16",), NONE),
    "turns::masking": (("mask",), NONE),
    "ulysses::shares": (NONE, ("fsdp2",)),
    "localization::planted": (
        ("two culprits on two ranks, one micro-batch",),
        ("rank 1, last micro-batch, first token", "two culprits in one sequence"),
    ),
    "localization::a_loss": (("off policy",), ("on policy",)),
    "trigger::a_norm": (("nan",), ("inf",)),
    "verdicts::a_spike": (
        ("opposite", "sequence", "padding", "backward", "entropy", "experts and a token", "stale", "replicas"),
        ("twelve", "weight", "forward", "scale", "experts", "not sampled", "replicas alike"),
    ),
    "verdicts::so_it_has": (NONE, ("transient-bf16",)),
    "verdicts::on_request": (("token-True",), ("transient-False",)),
    "verdicts::replicas_that": (("True",), ("False",)),
    "split::parts_of_unequal": (("token-mean",), ("seq-mean-token-mean",)),
    "split::a_row_that_fills": (("quartiles",), NONE),
    "split::training_with": (("buckets-fsdp2",), ("quartiles-fsdp2",)),
    "split::an_actor": (("quartiles-fsdp2",), ("buckets-fsdp2",)),
    "split::a_failure": (("buckets",), ("quartiles",)),
    "quartiles.test_actor::each_quartile": (NONE, ("entropy and kl terms",)),
    "quartiles.test_actor::probability": (NONE, ("2-fsdp2",)),
    "quartiles.test_actor::an_empty": (("all equally probable",), ("fewer than four tokens",)),
    "stages::at_frozen": (("FSDP1", "sequence means"), ("entropy and KL",)),
    "stages::it_is_two": (("0.4",), ("-0.4",)),
    "stages::the_events": (("1-stages0",), NONE),
    "stages::the_learning_rate": (("false-expected0",), NONE),
    "stages::the_localizer": (("low",), ("high",)),
    "stabilize.test_actor::the_optimizer": (
        ("FSDP1 with original parameters, by tensor, adagc",),
        ("FSDP2, by kind, zscore",),
    ),
    "stabilize.test_actor::a_gradient": (("a loss scale that overflows",), ("FSDP1",)),
    "stabilize.test_actor::an_outlier": (("FSDP2",), ("fp16",)),
    "stabilize.test_actor::a_resumed": (("FSDP2, adagc",), NONE),
    "stabilize.test_actor::stabilizers": (("FSDP1",), ("FSDP2",)),
    "stabilize.test_actor::observing": (("FSDP1",), NONE),
    "ratios::the_actor": (("token_clip clamps on both sides-FSDP2", "seq_clip clamps below-FSDP1"), ("both-FSDP2",)),
    "ratios::planted": (("FSDP2, gspo",), ("FSDP1",)),
    **{row: columns for columns, rows in ALL_OF.items() for row in rows.split()},
}
"""The end of a module's name and the start of a test's: its cases that are default tests on verl 0.7 and on 0.9.

Between them the two have nearly each promise once. `make test-slow`, and `scripts/test.sh verl09 -m slow`, have the
others. What is not here runs on both.
"""


def mark(items: list[pytest.Item]) -> None:
    """Mark what this trainer has nothing of, and what is not one of its default tests.

    Raises:
        pytest.UsageError: for a row or a case of the tables that no test has, where its module is collected whole.
    """
    column = {OF_VERL07: 0, "verl 0.9": 1}.get(TRAINER)
    seen: dict[str, set[str]] = {}
    for item in items:
        module, given = item.module.__name__, item.callspec if hasattr(item, "callspec") else None
        case = given.id if given else ""
        is_shared = item.path.relative_to(ROOT / "tests").as_posix().startswith(SHARED)
        if TRAINER != OF_VERL07 and is_shared:
            for name, reason in NOT_HERE[TRAINER].items():
                if name in item.name:
                    item.add_marker(pytest.mark.skip(reason=reason))
        elif not is_shared:
            continue
        where = f"{module}::{item.originalname.removeprefix('test_')}"
        row = next((row for row in BY_DEFAULT if row in where), None)
        cases = BY_DEFAULT[row][column] if row and column is not None else EVERY
        is_default = cases is EVERY or any(f"{case}-".startswith(f"{each}-") for each in cases)
        if not is_default:
            item.add_marker(pytest.mark.slow)
        seen.setdefault(where, set()).add(f"{case}-")
    if items and not any("::" in argument for argument in items[0].config.args):
        _check_tables(seen)


def _check_tables(seen: dict[str, set[str]]) -> None:
    for row, columns in BY_DEFAULT.items():
        if any(f"{row.partition('::')[0]}::" in where for where in seen):
            found = {case for where, cases in seen.items() if row in where for case in cases}
            for each in {case for cases in columns for case in cases or ()}:
                if not any(case.startswith(f"{each}-") for case in found):
                    raise pytest.UsageError(f"tests/trainers.py: {row} has no case {each!r}: it has {sorted(found)}")
