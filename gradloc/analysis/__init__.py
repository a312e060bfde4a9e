# SPDX-License-Identifier: Apache-2.0
"""Gradient analyses: the parts of a step's gradient.

Now and then, before an actor update and without taking a step, the whole batch's gradient is split: by term of the
loss and by how much the rewards of a prompt's rollouts differ (``buckets``), or by the probability of the tokens
(``quartiles``). ``reporter`` is the trainer's side, ``measure`` the workers', ``actor`` what both need of the actor.
"""
