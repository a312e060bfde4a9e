# SPDX-License-Identifier: Apache-2.0
"""What a search finds besides tokens: what made a spike that no token made, and where in the model it began."""
