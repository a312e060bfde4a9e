# SPDX-License-Identifier: Apache-2.0
"""The adapter to verl 0.7's actor and trainer: the only room, with its sibling for 0.9, that imports verl."""
