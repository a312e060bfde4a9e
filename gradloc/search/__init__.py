# SPDX-License-Identifier: Apache-2.0
"""The strategies that look for the tokens behind a spike, and the task that they share."""
