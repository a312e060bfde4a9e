# SPDX-License-Identifier: Apache-2.0
"""Where the gradient comes from: task, entropy and KL gradients over buckets of prompts by reward variance.

Now and then, before an actor update and without taking a step, the whole batch's gradient is split twice: by term of
the loss and by how much the rewards of a prompt's rollouts differ; or, if asked, by the probability of the tokens.
``reporter`` is the trainer's side and ``rows`` the workers'; ``actor`` names what they ask of the trainer's actor.
"""
