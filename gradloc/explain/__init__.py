# SPDX-License-Identifier: Apache-2.0
"""Every sentence and number as people read it, once: console, page, trackers and record share it. No torch."""
