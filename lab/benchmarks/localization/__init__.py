# SPDX-License-Identifier: Apache-2.0
"""Planted spikes, searched by every strategy and by brute force: behind `python -m lab.benchmarks.localize`."""
