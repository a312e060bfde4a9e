# SPDX-License-Identifier: Apache-2.0
"""A run on a page, in a terminal, or as tables."""
