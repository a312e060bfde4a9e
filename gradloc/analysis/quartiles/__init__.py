# SPDX-License-Identifier: Apache-2.0
"""The gradient by the tokens' probability, as arXiv 2505.12929 does."""
