# SPDX-License-Identifier: Apache-2.0
"""Side-by-side measurements; each is one command, see docs/benchmarks.md."""
