# SPDX-License-Identifier: Apache-2.0
"""verl's tests on TRL."""
