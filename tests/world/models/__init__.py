# SPDX-License-Identifier: Apache-2.0
"""What the tiny models are, and how their attention runs."""
