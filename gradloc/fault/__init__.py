# SPDX-License-Identifier: Apache-2.0
"""Find the link that broke: the batch, the last update, the weights, or the code between backward and step.

A gradient norm belongs to a batch *and* to the weights that it is measured at. At a spike a micro-batch of an earlier,
ordinary step (:mod:`.reference`) is run at the present weights: quiet, and the batch is at fault; loud, and it is not.
Then the last update is undone from the optimizer's own state (:mod:`.updates`) and the step is run again: where that
heals it the update is at fault, else the weights. :mod:`.find` has the decision. docs/spikes-without-tokens.md shows
how each fault looks.
"""
