# SPDX-License-Identifier: Apache-2.0
"""Micro-batches that are added up before ranks reduce them: what half precision leaves of a spike is in the bound."""

from tests.adapters.conformance.test_layouts import ACTOR, EACH_SUM, SUMS, check_bound

ONCE = f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation=true"


@EACH_SUM
def test_it_is_within_the_bound(world, dump_dir, sums, times):
    check_bound(world, dump_dir, [*SUMS[sums], ONCE], times)
