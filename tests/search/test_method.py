# SPDX-License-Identifier: Apache-2.0
"""docs/method.md's section 3: how far log-odds bend."""

import math

import torch


def test_3_what_bends_in_log_odds_is_the_logsumexp_of_the_others_within_its_bound():
    torch.manual_seed(0)
    for width in (0.3, 1.0, 2.0):
        worst = 0.0
        for _ in range(200):
            logits, rates = 3 * torch.randn(6, dtype=torch.float64), width * torch.rand(6, dtype=torch.float64)
            up, down = (torch.logsumexp(logits + sign * rates, 0) for sign in (1, -1))
            derivative = float(logits.softmax(0) @ rates)
            worst = max(worst, abs(float(up - down) / 2 - derivative))
        assert 0 < worst <= 1.05 * width**3 / (36 * math.sqrt(3)), "1.05: the next order"
