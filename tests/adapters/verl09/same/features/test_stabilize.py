# SPDX-License-Identifier: Apache-2.0
from tests.stabilize.test_config import (  # noqa: F401
    test_a_batch_without_the_rollouts_log_probs_is_refused_on_every_rank,
    test_a_run_under_safe_trains,
)
from tests.stabilize.test_ratio_clip import (  # noqa: F401
    test_planted_culprits_are_found_through_the_clips_with_their_true_norms,
    test_the_actor_trains_on_verls_loss_times_the_slow_weights,
)
from tests.stabilize.test_stabilizer import *  # noqa: F403
