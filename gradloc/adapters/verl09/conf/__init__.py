# SPDX-License-Identifier: Apache-2.0
"""The configs that Hydra finds under ``pkg://``."""
