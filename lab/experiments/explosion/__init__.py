# SPDX-License-Identifier: Apache-2.0
"""Cause a GRPO explosion by an importance ratio of 100 000, and compare safeguards.

The planted tokens are part of this experiment and not of the patch. Everything is loaded by verl's hooks and acts at
two steps only (docs/explosion.md):

- `plant`    the plan; the marks of planted rows and tokens; the long response; weights and record on disk
- `rollout`  verl 0.7: makes the long response, marks the stale tokens and replaces their old log-probs; loaded by
             `agent_loop_manager_class`, `model.external_lib` and `reward_manager.source=importlib`
- `summary`  the results, arm by arm

On verl 0.9 `lab.experiments.verl09.explosion` replaces `rollout`.
"""
