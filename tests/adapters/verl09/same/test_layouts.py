# SPDX-License-Identifier: Apache-2.0
from tests.adapters.verl07.test_layouts import *  # noqa: F403
from tests.adapters.verl07.test_layouts import ACTOR, EACH_SUM, SUMS, check_bound

ONCE = f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation=true"


@EACH_SUM
def test_so_it_is_where_micro_batches_are_added_up_before_they_are_reduced(world, dump_dir, sums, times):
    check_bound(world, dump_dir, [*SUMS[sums], ONCE], times)
