# SPDX-License-Identifier: Apache-2.0
"""What the demo has verl 0.9 import: `actor_rollout_ref.model.external_lib` takes one name."""

from experiments.verl09 import fault, rollout

__all__ = ["fault", "rollout"]
