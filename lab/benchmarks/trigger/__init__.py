# SPDX-License-Identifier: Apache-2.0
"""Compare trigger rules on generated and real series of gradient norms."""
