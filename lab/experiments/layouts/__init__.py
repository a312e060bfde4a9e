# SPDX-License-Identifier: Apache-2.0
"""What the demo needs to run on other layouts than its own, with no GPU: a model of experts, sequences end to end."""
