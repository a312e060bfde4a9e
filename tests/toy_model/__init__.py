# SPDX-License-Identifier: Apache-2.0
"""One optimizer step with no trainer around it: what `gradloc.core` and `gradloc.search` are tested and measured on.

A small decoder in plain torch, a batch in which culprits can be planted, and the step over both, in one process or on
the ranks of a process group, unsharded, under FSDP2 or under FSDP1. Needs torch; no verl, transformers or Ray.

    model = build("tiny")                                       # same weights every time
    batch = random_batch(model).planted({(3, 5): 1e4})          # row 3, response position 5: its advantage
    step = ToyStep(shard(model, "plain"), batch, num_micro_batches=4)
    space, ranks = GradientSpace(step.model), Ranks()
    step.train()                                                # fills .grad and what the step recorded
    spike = Spike("fixed", space.norm(), threshold, tau, batch.num_tokens)
    finding = localize(step, space, ranks, spike, 1.0)
    [batch.place(token, ranks.size, 4) for token in finding.tokens]     # [(3, 5)]
    Oracle(model, batch).norm((3, 5))                           # by a backward of its own, unsharded

On several ranks every rank builds the same model and batch, shards with "fsdp2" or "fsdp1", and takes its own rows: the
fixture `bare_world` (two ranks, no verl) runs a function by its name on both, as tests/toy_model/scenarios.py has one.
"""
# ruff: noqa: F401 (what tests and benchmarks import from here)

from tests.toy_model.amplifier import Amplified, Sharpened
from tests.toy_model.batch import NUM_PROMPT, Batch, Place, random_batch
from tests.toy_model.model import SIZES, Decoder, ModelSize, build, entropy_of, log_prob_of
from tests.toy_model.oracle import Oracle
from tests.toy_model.step import AGGREGATIONS, Loss, ToyStep, ToyTrainer, clip_gradient, shard
