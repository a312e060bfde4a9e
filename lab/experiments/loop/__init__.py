# SPDX-License-Identifier: Apache-2.0
"""The demo in a plain PyTorch loop."""
