# SPDX-License-Identifier: Apache-2.0
"""Run the demo on other layouts without a GPU: a mixture of experts, packed sequences."""
