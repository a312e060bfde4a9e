# SPDX-License-Identifier: Apache-2.0
"""The reward of Knights and Knaves for a verl without the patch: `reward.custom_reward_function`."""

import importlib.util
from pathlib import Path

PATCHED = Path("verl_overrides/v0.7.0/verl/utils/reward_score/kk.py")

_spec = importlib.util.spec_from_file_location("kk_reward", Path(__file__).resolve().parents[2] / PATCHED)
_kk = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_kk)


def score(data_source, solution_str: str, ground_truth: dict, extra_info=None, **_) -> dict:
    """The patch's own, whatever the source."""
    return _kk.compute_score(solution_str, ground_truth)
