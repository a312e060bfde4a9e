# SPDX-License-Identifier: Apache-2.0
"""What there is to find beside tokens: what made a spike that no token did, and where in the model it began."""
