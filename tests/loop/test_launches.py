# SPDX-License-Identifier: Apache-2.0
"""Count what a search launches on a device beyond its passes, and how often its host waits, on the path of a GPU."""

from unittest import mock

import pytest
import torch

from gradloc.config import EvidenceConfig, GradLocConfig
from gradloc.core.gradients import GradientSpace
from gradloc.core.probe import Prober
from gradloc.core.ranks import Ranks
from gradloc.loop.localizer import Localizer
from gradloc.loop.messages import Policy
from lab.benchmarks.counter import DeviceCounter
from tests.toy_model import Decoder, ModelSize, ToyStep, ToyTrainer, clip_gradient, random_batch

MICRO_BATCHES, T = 4, 64
FIXED, EACH = 400, 2.5  # operations of a search, and more for each parameter: a copy, and a gradient that begins at 0
READS = 8  # the step's norm; what was noted; the reference; records; up to three of shares; the certificate


def counted(num_culprits, layers, monkeypatch):
    """Return operations and reads of the look into a fourth step's spike, without its passes; and its parameters."""
    torch.manual_seed(0)
    model = Decoder(ModelSize(vocabulary=96, width=32, layers=layers, heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    localizer = Localizer(ToyTrainer(model, optimizer), Ranks(), GradLocConfig(evidence=EvidenceConfig(bundle="off")))
    batch = random_batch(model, 2 * MICRO_BATCHES, T)
    batch, norm, counter = batch.edited(mask=torch.ones_like(batch.mask)), 1e9, DeviceCounter()
    run = Prober._run_on_all_ranks

    def within(self, joint):
        with counter.within("pass"):
            return run(self, joint)

    monkeypatch.setattr("gradloc.core.gradients.is_slow", lambda device: False)
    monkeypatch.setattr(Prober, "_run_on_all_ranks", within)
    for number in range(4):
        rows = range(num_culprits if number == 3 else 0)
        step = ToyStep(model, batch.planted({(row, 3 + 7 * row): (-1) ** row * 1e4 * 0.8**row for row in rows}), 4)
        optimizer.zero_grad()
        policy = Policy(number + 1, "fixed", [2 * MICRO_BATCHES * T], [4 * norm], [4 * norm], max_events=1)
        localizer.begin_update(policy, GradientSpace(model))
        localizer.begin_mini_batch(step)
        step.train(localizer.after_backward)
        norm, counter = float(given := clip_gradient(model, 1.0)), DeviceCounter()
        with counter:
            localizer.before_step(given)
        localizer.end_update()
        optimizer.step()
    (event,) = localizer.events
    assert len(event.event.culprits) == num_culprits and event.event.certificate.verdict == "explained"
    return counter.ops[""], counter.reads[""], len(list(model.parameters()))


@pytest.mark.parametrize("num_culprits", [1, 8])
def test_a_search_launches_few_operations_a_parameter_and_waits_eight_times(num_culprits, monkeypatch):
    with mock.patch("gradloc.core.tracker._MAX_COST", 1.0):
        ops, reads, num_params = counted(num_culprits, 12, monkeypatch)
    print(f"{ops} operations beyond the passes, {reads} reads, {num_params} parameters")
    assert ops <= FIXED + EACH * num_params and reads <= READS
