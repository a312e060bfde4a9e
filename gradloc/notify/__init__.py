# SPDX-License-Identifier: Apache-2.0
"""Announce events as they happen: on the console, in the run's trackers, by alerts. No torch, no trainer.

A failure in here is a line in the log and never reaches training: see :class:`~.notifier.Notifier`.
"""
