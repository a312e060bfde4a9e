# SPDX-License-Identifier: Apache-2.0
"""The tests of verl 0.7's actor, run by the same code on verl 0.9's engine."""

import importlib.metadata
from pathlib import Path

import pytest

HERE = Path(__file__).parent

NOT_HERE = {
    "the_page_shows_these_distances": "the page shows those of verl 0.7's loss",
    "[fused, FSDP2": "verl 0.9.1 itself fails: FSDP2 shards an untied head apart, and the kernel takes its weight",
    "stages_are_told_apart": "verl 0.9's trainer has reduced the metrics of each update: test_parity.py",
    "[padding": "verl 0.9's batches have no padding",
    "-padding]": "verl 0.9's batches have no padding",
}
"""Part of a test's name, and why verl 0.9 has nothing to test there."""
SLOW = (
    "by auto]",  # the layouts, but for these
    "by bisect]",
    "boundary_is_heard_by_all_and_recovered[bisect]",
    "-settings",  # trouble with telling, which is not the engine's
    "under_every_loss",  # but for one
    "add_up_however_they_are_grouped",  # but for two
    "[no dropout-",
    "healthy_twins",
    "from_the_cap_to_its_end",
    "each_masked_step_says",
)
BUT_FOR = (
    "FSDP2, weights kept after forward by auto]",
    "FSDP1, original parameters by auto]",
    "file in the way",
    "under_every_loss[cispo]",
    "grouped[FSDP1]",
    "grouped[FSDP2, entropy and KL]",
)
"""Parts of the names of those that take longer than the default allows, and of those among them that do not."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        for name, reason in NOT_HERE.items():
            if name in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))
        if any(name in item.name for name in SLOW) and not any(name in item.name for name in BUT_FOR):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def verl_version(verl09: None) -> str:
    """The installed verl's."""
    return importlib.metadata.version("verl")
