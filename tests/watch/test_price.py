# SPDX-License-Identifier: Apache-2.0
"""What a healthy step of a watched loop adds to what the loop asks of the device: counted on the path of a GPU."""

import torch
import torch.nn.functional as F

import gradloc
from lab.benchmarks.counter import DeviceCounter
from tests.toy_model.model import Decoder, ModelSize

MICRO_BATCHES, T = 4, 8


def counted(watch, model, optimizer):
    """Operations, reads by the host and collectives of the third step, its optimizer's step included."""
    for number in range(1, 4):
        batch = torch.randint(96, (2 * MICRO_BATCHES, T + 1), device="cpu")
        counter = DeviceCounter()
        with counter:
            optimizer.zero_grad()
            for x in batch.split(2):
                logits = model(x[:, :-1], T)
                (F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()) / MICRO_BATCHES).backward()
            before = sum(counter.reads.values())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert number < 3 or before == sum(counter.reads.values()) == 0, "no host read before the step"
            optimizer.step()
        assert number < 3 or not watch or watch.metrics["gradloc/spikes"] == 0
    return sum(counter.ops.values()), sum(counter.reads.values()), sum(counter.collectives.values()), counter.places


def test_a_healthy_step_costs_under_a_hundredth_of_the_operations_and_two_reads(tmp_path, monkeypatch):
    for module in ("gradients", "tracker"):
        monkeypatch.setattr(f"gradloc.core.{module}.is_slow", lambda device: False)
    found = {}
    for is_watched in (False, True):
        torch.manual_seed(0)
        model = Decoder(ModelSize(vocabulary=96, width=16, layers=6, heads=2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        watch = gradloc.Watch(model, optimizer, tmp_path) if is_watched else None
        found[is_watched] = counted(watch, model, optimizer)
    (ops, reads, _, _), (watched_ops, watched_reads, collectives, places) = found[False], found[True]
    print(f"operations {ops} -> {watched_ops} ({watched_ops / ops - 1:.2%}), reads {reads} -> {watched_reads}", places)
    assert watched_ops <= 1.01 * ops and watched_reads - reads <= 2 and collectives == 0
