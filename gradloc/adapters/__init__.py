# SPDX-License-Identifier: Apache-2.0
"""One room for each trainer: how it updates a model, told to the loop in its own words."""
