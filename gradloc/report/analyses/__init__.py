# SPDX-License-Identifier: Apache-2.0
"""The gradient analyses: read, drawn, and put on a page."""
