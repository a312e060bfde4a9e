# SPDX-License-Identifier: Apache-2.0
"""The adapter to verl 0.9's engine workers: nothing in verl is changed, everything is registered from outside."""
