# SPDX-License-Identifier: Apache-2.0
"""The gradient analyses and the rollout filter on verl 0.9."""
