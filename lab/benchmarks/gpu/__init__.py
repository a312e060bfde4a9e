# SPDX-License-Identifier: Apache-2.0
"""What holds on a GPU; `python -m lab.benchmarks.gpu`."""
