# SPDX-License-Identifier: Apache-2.0
"""Reward functions for verl, by `custom_reward_function`; nothing else of GradLoc imports them."""
