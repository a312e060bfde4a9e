# SPDX-License-Identifier: Apache-2.0
"""Which groups of rollouts are trained on."""
