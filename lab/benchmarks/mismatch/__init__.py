# SPDX-License-Identifier: Apache-2.0
"""Disagreements with a known cause, made by real forwards, and how often ``gradloc.mismatch`` names it."""
