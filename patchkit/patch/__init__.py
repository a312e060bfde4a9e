# SPDX-License-Identifier: Apache-2.0
"""Reads patches, checksum lists and the manifest, strictly, and applies a patch to bytes: pure."""
