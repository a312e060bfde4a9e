# SPDX-License-Identifier: Apache-2.0
"""GradLoc under ``transformers.Trainer``."""
