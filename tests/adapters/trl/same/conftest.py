# SPDX-License-Identifier: Apache-2.0
"""The tests of verl 0.7's actor, run by the same code on TRL's trainer under DDP."""

import importlib.metadata
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NOT_HERE = {
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
    "[FSDP1-": "TRL's FSDP2 is in test_ranks.py",
    "skip_takes_no_step_at_all": "test_actions.py has TRL's",
    "fill_a_batch_up": "a rollout correction is verl's",
    "driver_tells_of_advantages": "test_trainer.py has what TRL's rows hold of them",
    "abort_stops_the_run": "test_actions.py and test_ranks.py have TRL's",
}
"""Part of a test's name, and why there is nothing to test here, or where it is tested."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name, reason in NOT_HERE.items() if item.path.is_relative_to(HERE) else ():
            if name in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))
        if item.path.is_relative_to(HERE) and "recovered[bisect]" in item.name:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def verl_version() -> str:
    """TRL's, here."""
    return importlib.metadata.version("trl")
