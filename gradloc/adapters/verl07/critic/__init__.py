# SPDX-License-Identifier: Apache-2.0
"""The critic of verl 0.7: what its workers and its trainer call."""
