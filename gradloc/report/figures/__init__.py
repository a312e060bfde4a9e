# SPDX-License-Identifier: Apache-2.0
"""Curves and shapes as SVG."""
