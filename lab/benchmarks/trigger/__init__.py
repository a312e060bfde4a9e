# SPDX-License-Identifier: Apache-2.0
"""Which rule flags which steps: generated and real series of gradient norms through several rules."""
