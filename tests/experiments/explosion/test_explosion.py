# SPDX-License-Identifier: Apache-2.0
"""The explosion itself: two arms of it on the real trainer, its token, its table."""

import pytest
from omegaconf import OmegaConf

from experiments import catalog

from .short import explode


@pytest.mark.parametrize("section", ["explosion", "knobs", "data"])
def test_on_both_verls_the_same_is_planted_with_the_same_settings(section):
    one, other = (
        OmegaConf.load(catalog.CONFIGS / f"{experiment.name}.yaml")
        for experiment in (catalog.EXPLOSION, catalog.EXPLOSION_VERL09)
    )
    assert OmegaConf.to_container(one[section]) == OmegaConf.to_container(other[section])


@pytest.mark.e2e
@pytest.mark.slow
def test_the_stale_token_explodes_is_named_and_is_compared_with_the_healthy_twin(patched_tree, tmp_path):
    explode(tmp_path / "suite", VERL_REPO=str(patched_tree))
