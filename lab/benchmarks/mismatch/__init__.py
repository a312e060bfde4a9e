# SPDX-License-Identifier: Apache-2.0
"""Measure how often ``gradloc.mismatch`` names a known cause of log-prob mismatch, from real forwards."""
