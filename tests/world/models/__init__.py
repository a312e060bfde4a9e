# SPDX-License-Identifier: Apache-2.0
"""Tiny models, and how their attention runs."""
