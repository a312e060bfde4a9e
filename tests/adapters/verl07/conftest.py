# SPDX-License-Identifier: Apache-2.0
"""The actor's main tests run on every verl that there is a patch for, in part; GRADLOC_TEST_VERL has all run on one."""

import json
import os
from pathlib import Path

import pytest

from tests.conftest import ROOT, VERL

PATCHES = json.loads((ROOT / "patches/manifest.json").read_text())["patches"]
VERLS = [entry["base"].removeprefix("v") for entry in PATCHES]
ON_ALL = {"test_localization", "test_harmless", "test_layouts", "test_experts", "test_ulysses"}
ROOM = Path(__file__).parent
ALSO_ON_09 = {"test_cures", "test_experts", "test_ulysses"}
"""Of these, verl 0.9's room runs all by default, and the default tests on 0.7 some."""
ON_07 = {"pushed down", "rewards, divided", "advantage of a row, GSPO", "veto"}
"""Of these modules' cases."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat the modules of ON_ALL for each verl."""
    is_chosen = "GRADLOC_TEST_VERL" in os.environ
    if "verl_version" in metafunc.fixturenames and metafunc.module.__name__.split(".")[-1] in ON_ALL and not is_chosen:
        metafunc.parametrize("verl_version", VERLS, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a verl beyond the first, the default tests see that it trains as unpatched and that two culprits are named; on
    the first, of what 0.9's room runs as well, some."""
    for item in items:
        given = getattr(item, "callspec", None) and item.callspec.params or {}
        is_here = ROOM in item.path.parents and "GRADLOC_TEST_VERL" not in os.environ
        if is_here and item.path.stem in ALSO_ON_09 and {"kind", "name", "layout"} & set(given):
            values = {value for value in given.values() if isinstance(value, str)}
            if not values & ON_07:
                item.add_marker(pytest.mark.slow)
        is_default = item.module.__name__.endswith("test_harmless") and given.get("strategy", "auto") == "auto"
        is_default = is_default or len(given.get("plants", ())) > 1
        is_default = is_default and not {"four_ranks", "single"} & set(item.fixturenames)
        if given.get("verl_version", VERL) != VERL and not is_default:
            item.add_marker(pytest.mark.slow)
