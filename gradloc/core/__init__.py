# SPDX-License-Identifier: Apache-2.0
"""The core: a step's gradient, its probes and its trigger. Knows torch, and nothing of a trainer."""
