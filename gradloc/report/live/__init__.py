# SPDX-License-Identifier: Apache-2.0
"""Follows a run that is going on: a view for the terminal, and the page on this machine's own address."""
