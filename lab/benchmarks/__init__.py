# SPDX-License-Identifier: Apache-2.0
"""Measurements, one command each; docs/benchmarks.md has the results."""
