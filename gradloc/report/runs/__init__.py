# SPDX-License-Identifier: Apache-2.0
"""Reads what runs left behind."""
