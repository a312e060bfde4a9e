# SPDX-License-Identifier: Apache-2.0
"""The gradient by term of the loss and by bucket of reward deviation, as RAGEN splits it."""
