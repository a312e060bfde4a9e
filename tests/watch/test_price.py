# SPDX-License-Identifier: Apache-2.0
"""What a healthy step of a watched loop asks of the device beside the loop's own: counted on the path of a GPU."""

import torch

import gradloc
from benchmarks.counter import DeviceCounter
from gradloc import token_log_probs
from tests.bare.model import Decoder, ModelSize

MICRO_BATCHES, T = 4, 8


def counted(watch, model, optimizer):
    """Operations, reads by the host, collectives of the third step; the first is run twice by the watch."""
    for number in range(1, 4):
        batch = torch.randint(96, (2 * MICRO_BATCHES, T + 1), device="cpu")
        counter = DeviceCounter()
        with counter:
            optimizer.zero_grad()
            for x in batch.split(2):

                def forward():
                    return token_log_probs(model(x[:, :-1], T), x[:, 1:])  # noqa: B023

                mask = torch.ones_like(x[:, 1:], device="cpu")
                log_probs = watch.log_probs(forward, mask, x[:, 1:]) if watch else forward()
                (-log_probs.mean() / MICRO_BATCHES).backward()
            if watch:
                watch.clip_grad_norm_(1.0)
            else:
                float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        assert number < 3 or not watch or watch.metrics["gradloc/spikes"] == 0
    return sum(counter.ops.values()), sum(counter.reads.values()), sum(counter.collectives.values()), counter.places


def test_a_healthy_step_costs_under_3_percent_of_operations_and_two_reads(tmp_path, monkeypatch):
    for module in ("gradients", "tracker"):
        monkeypatch.setattr(f"gradloc.core.{module}.is_slow", lambda device: False)
    found = {}
    for is_watched in (False, True):
        torch.manual_seed(0)
        model = Decoder(ModelSize(vocabulary=96, width=16, layers=12, heads=2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        watch = gradloc.Watch(model, optimizer, tmp_path) if is_watched else None
        found[is_watched] = counted(watch, model, optimizer)
    (ops, reads, _, _), (watched_ops, watched_reads, collectives, places) = found[False], found[True]
    print(f"operations {ops} -> {watched_ops}, reads {reads} -> {watched_reads} {dict(places)}")
    assert reads == 1, "the loop's own, of the norm"
    assert watched_ops <= 1.03 * ops and watched_reads <= 2 and collectives == 0
