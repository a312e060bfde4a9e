# SPDX-License-Identifier: Apache-2.0
"""What a healthy step of a watched loop adds to what the loop asks of the device: counted on the path of a GPU."""

import pytest
import torch
import torch.nn.functional as F

import gradloc
from lab.benchmarks.counter import DeviceCounter
from tests.toy_model.model import Decoder, ModelSize

MICRO_BATCHES, T = 4, 8


def counted(folder, layers, first, last):
    """Operations, reads by the host and collectives of these steps, their optimizer's steps included, without a watch
    and with one."""
    found = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        model = Decoder(ModelSize(vocabulary=96, width=16, layers=layers, heads=2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        watch = gradloc.Watch(model, optimizer, folder) if is_watched else None
        ops, reads, collectives = 0, 0, 0
        for number in range(1, last + 1):
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
            if number >= first:
                assert not watch or watch.metrics["gradloc/spikes"] == 0
                ops += sum(counter.ops.values())
                reads += sum(counter.reads.values())
                collectives += sum(counter.collectives.values())
        found.append((ops, reads, collectives))
    return found


@pytest.fixture(autouse=True)
def as_on_a_card(monkeypatch):
    monkeypatch.setattr("gradloc.core.gradients.is_slow", lambda device: False)


def test_a_healthy_step_costs_under_a_hundredth_of_the_operations_and_two_reads(tmp_path):
    (ops, reads, _), (watched_ops, watched_reads, collectives) = counted(tmp_path, layers=6, first=3, last=3)
    print(f"operations {ops} -> {watched_ops} ({watched_ops / ops - 1:.2%}), reads {reads} -> {watched_reads}")
    assert watched_ops <= 1.01 * ops and watched_reads - reads <= 2 and collectives == 0


@pytest.mark.slow
def test_at_24_layers_the_steps_that_keep_a_reference_are_in_the_hundredth(tmp_path):
    (ops, *_), (watched_ops, *_) = counted(tmp_path, layers=24, first=4, last=11)
    print(f"operations of eight steps {ops} -> {watched_ops} ({watched_ops / ops - 1:.2%})")
    assert watched_ops <= 1.01 * ops
