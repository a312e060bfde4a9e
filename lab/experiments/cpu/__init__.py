# SPDX-License-Identifier: Apache-2.0
"""What verl's real trainer needs on a machine with no GPU.

Every module is loaded by a hook of verl's own and none is part of the patch:

- `device`   by `VERL_USE_EXTERNAL_MODULES`: gloo instead of NCCL, the missing pieces of `torch.cpu`
- `rollout`  by `model.external_lib` (worker side) and `agent_loop_manager_class` (driver side)
- `reward`   by `reward_manager.source=importlib`; it also arms the demo's `fault`
"""
