# SPDX-License-Identifier: Apache-2.0
"""Numbers only: a step's gradient, probes of parts of it, the trigger's rule. Imports torch, but no trainer."""
