# SPDX-License-Identifier: Apache-2.0
"""What ``apply_patch.py`` does: knows the patches, judges a tree, puts one on or takes it off."""
