# SPDX-License-Identifier: Apache-2.0
"""What Hydra finds under ``pkg://``."""
