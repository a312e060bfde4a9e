# SPDX-License-Identifier: Apache-2.0
"""The adapter to verl 0.7's actor and trainer, which the patch makes call it."""
