# SPDX-License-Identifier: Apache-2.0
"""Choose the groups of rollouts to train on; off by default. ``choose.py`` first."""
