# SPDX-License-Identifier: Apache-2.0
"""Announces what happened while it happens: a line on the console, the run's trackers, alerts. No torch, no trainer.

Whatever fails or hangs in here is a line in the log and never reaches training: see :class:`~.notifier.Notifier`.
"""
