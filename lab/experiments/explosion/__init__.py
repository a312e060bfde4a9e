# SPDX-License-Identifier: Apache-2.0
"""A GRPO explosion made on purpose: an importance ratio of 100 000, and what each safeguard does.

What is planted belongs to this experiment and never to the patch. Everything is loaded by hooks of
verl's own and acts at two steps only (docs/explosion.md):

- `plant`    the plan, and what a batch carries of it: which rows and tokens are planted; the copy of the
             policy that generates: a long response, its weights on disk; what was planted, on record
- `rollout`  by `agent_loop_manager_class` (driver) and `model.external_lib` (workers): makes the long response, marks
             the stale tokens, stores the old log-probs that they had; by `reward_manager.source=importlib`: the reward
             manager that tells the estimator

On verl 0.9 `lab.experiments.verl09.explosion` stands in for `rollout`.

- `summary`: what came of it, arm by arm
"""
