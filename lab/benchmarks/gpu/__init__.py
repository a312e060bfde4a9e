# SPDX-License-Identifier: Apache-2.0
"""Check the search on a GPU: `python -m lab.benchmarks.gpu`."""
