# SPDX-License-Identifier: Apache-2.0
"""Strategies that find the tokens behind a spike. :mod:`.find` runs one; :mod:`.auto` is the default."""
