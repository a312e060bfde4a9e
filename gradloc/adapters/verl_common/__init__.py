# SPDX-License-Identifier: Apache-2.0
"""Shared by the adapters to verl 0.7 and 0.9."""
