# SPDX-License-Identifier: Apache-2.0
"""Run verl's real trainer on a machine without a GPU.

Every module is loaded by one of verl's hooks, and none is part of the patch:

- `device`   by `VERL_USE_EXTERNAL_MODULES`: gloo instead of NCCL, the missing pieces of `torch.cpu`
- `rollout`  by `model.external_lib` (worker side) and `agent_loop_manager_class` (driver side)
- `reward`   by `reward_manager.source=importlib`; it also arms the demo's `fault`
"""
