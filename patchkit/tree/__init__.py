# SPDX-License-Identifier: Apache-2.0
"""A verl tree: what it is, what it holds, and how it changes as a whole or not at all."""
