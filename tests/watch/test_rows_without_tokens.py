# SPDX-License-Identifier: Apache-2.0
"""Rows that are no tokens, as a classifier's: an event calls them rows, and says nothing of tokens or documents."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import gradloc
from gradloc.command import main
from gradloc.report.pages.exports import to_markdown
from gradloc.report.runs.run import read_run
from tests.world.events import events_in

BAD, STEP, LARGE = 17, 31, 1e3


def losses_of(kind: str, given: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the loss of each row."""
    if kind == "regression":
        return mse_loss(given[:, 0], x.sum(1), reduction="none")
    labels = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    labels = torch.where(x.abs().amax(1) > LARGE, 3 - labels, labels)
    return cross_entropy(given, labels, reduction="none")


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "label"), [("classes", "loss_weight"), ("input", "large_jacobian"), ("regression", "loss_weight")]
)
def test_a_bad_row_is_a_row(tmp_path, kind, label):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    watch = gradloc.Watch(model, optimizer, str(tmp_path))
    for step in range(1, STEP + 1):
        x, weights = torch.randn(64, 20), torch.ones(64)
        if step == STEP and kind == "input":
            x[BAD] *= 1e4
        elif step == STEP:
            weights[BAD] = 1e4
        optimizer.zero_grad()
        (losses_of(kind, model(x), x) * weights).mean().backward()
        optimizer.step()
    watch.close()
    (event,) = events_in(tmp_path)
    (culprit,) = event["culprits"]
    assert (culprit["micro_batch_row"], culprit["span"], culprit["token_ids"]) == (BAD, "sequence", [])
    assert culprit["cause"]["label"] == label and "log_prob" not in culprit["values"]
    head = torch.cat([param.grad.flatten() for param in model[-1].parameters()])
    assert event["head_grad_norm"] == pytest.approx(head.norm().item(), rel=0.01)
    run = read_run(tmp_path)
    page = to_markdown(run, [*run.events])
    assert f"One row made the step-{STEP} spike" in page and f"Row {BAD} carries" in page
    assert not any(word in page for word in ("document", "One token", "<0>", "- log-prob:"))


@pytest.mark.parametrize("pooling", ["none", "first"])
@pytest.mark.parametrize("shape", [(8, 20), (8, 5, 20)], ids=["rows", "rows of five"])
def test_a_row_whose_input_is_nan_is_left_out(tmp_path, shape, pooling):
    """The rest is what a batch without the row gives, though its NaN would stay one under a weight of 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 1))
    x, masks = torch.randn(shape), torch.full(shape, -torch.inf)
    x[3] = x[3].index_fill(-1, torch.tensor([7]), torch.nan)

    def loss_of(given: torch.Tensor) -> torch.Tensor:
        given = given[:, 0] if pooling == "first" else given
        return mse_loss(given, torch.ones_like(given), reduction="sum") / 8

    rest = torch.autograd.grad(loss_of(model(x[torch.arange(8) != 3])), [*model.parameters()])

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, *others):
            return self.model(x)

    masked = Masked()
    gradloc.Watch(masked, optimizer := torch.optim.SGD(masked.parameters(), 1e-3), str(tmp_path))
    others = torch.zeros(8, 0), torch.nested.nested_tensor([torch.ones(2)] * 8), x.float().to(torch.float8_e4m3fn)
    loss_of(masked(x, masks, *others)).backward()
    optimizer.step()
    (event,) = events_in(tmp_path)
    (culprit,) = event["culprits"]
    assert (culprit["micro_batch_row"], culprit["cause"]["label"]) == (3, "non_finite_input")
    assert culprit["cause"]["numbers"]["document_broken"] == x.isnan().sum()
    norm = torch.cat([grad.flatten() for grad in rest]).norm().item()
    assert event["certificate"]["norm_after"] == pytest.approx(norm, abs=event["certificate"]["error_bound"])
    assert event["certificate"]["verdict"] == "explained"


def test_health_sees_norms_that_are_nan(tmp_path, capsys):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    watch = gradloc.Watch(model, optimizer, str(tmp_path))
    for step in range(6):
        optimizer.zero_grad()
        (model(torch.ones(4, 4)).sum() * (math.nan if step >= 3 else 1.0)).backward()
        optimizer.step()
    watch.close()
    capsys.readouterr()
    main(["health", str(tmp_path)])
    said = " ".join(capsys.readouterr().out.split())
    assert "danger at step 6" in said
    assert "actor/grad_norm is not finite now and at the 2 steps before (3 in a row are enough for danger)." in said


def test_mask_takes_the_step_without_a_row_of_nan_bit_for_bit(tmp_path):
    def trained(row: float, weights: torch.Tensor, folder: str = "") -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        watch = gradloc.Watch(model, optimizer, folder, "mask") if folder else None
        for step in range(3):
            x = torch.randn(40, 20)
            x[BAD] = row if step == 1 else x[BAD]
            optimizer.zero_grad()
            losses = mse_loss(model(x), torch.ones(40, 1), reduction="none").squeeze(1)
            (losses * (weights if step == 1 else 1.0)).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if watch is not None:
            watch.close()
        return model

    masked = trained(math.nan, torch.ones(40), str(tmp_path))
    without = trained(0.0, (torch.arange(40) != BAD).float())
    assert all(map(torch.equal, masked.parameters(), without.parameters()))
    (event,) = events_in(tmp_path)
    assert event["action"]["taken"] == "mask"
