# SPDX-License-Identifier: Apache-2.0
"""Stabilizers, each off by default.

``ratio_clip`` weighs tokens and sequences that drifted from the policy that wrote them, ``layer_clip`` bounds each
layer's gradient by its own history, ``skip_step`` skips a step whose norm is far above the last ones. ``stabilizer``
is what the actor calls, ``memory`` what the trainer calls.
"""
