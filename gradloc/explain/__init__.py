# SPDX-License-Identifier: Apache-2.0
"""The sentences and numbers that console, page, trackers and record share. No torch."""
