# SPDX-License-Identifier: Apache-2.0
"""Stabilizers: what an update does against a gradient spike, each by itself and off by default.

``ratio_clip`` weighs tokens and sequences that drifted from the policy that wrote them, ``layer_clip`` bounds each
layer's gradient by its own history, ``skip_step`` takes no step that is far off the last ones: plain arithmetic, all
three. ``stabilizer`` is what a trainer's actor calls, ``memory`` the trainer.
"""
