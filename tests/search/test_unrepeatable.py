# SPDX-License-Identifier: Apache-2.0
"""Kernels that do not repeat: the certificate keeps its word, and with kernels that do it costs what it says."""

import pytest

from gradloc.core.certificate import Removal
from gradloc.core.probe import Prober
from gradloc.core.ranks import Ranks
from gradloc.core.selection import Token
from lab.benchmarks.unrepeatable import SIZES, measure, problems
from tests.search import trained
from tests.toy_model import build, random_batch
from tests.toy_model.noise import unrepeatable
from tests.toy_model.scenarios import certify_unrepeatable


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("size", SIZES)
def test_the_true_norm_lies_within_the_bound_and_the_planted_token_is_named(share, size):
    assert problems(certify_unrepeatable("plain", "float32", share, size)) == []


@pytest.mark.parametrize("size", [10.0, 1e3, 1e4])
def test_in_float32_a_culprit_is_subtracted_and_what_that_rounds_off_is_measured(size):
    found = certify_unrepeatable("plain", "float32", 0.0, size)
    assert problems(found) == [] and found["method"] == "subtract"
    assert 0 < found["replay_difference"] < 1e-6 * found["size"] * found["truth"]
    assert found["error_bound"] < 1e-4 * found["size"] * found["truth"]


@pytest.mark.parametrize(("others", "dtype"), [((0,), "float32"), ((0, 15), "float32"), ((0, 15), "bfloat16")])
@pytest.mark.parametrize("share", [0.0, 0.01])
def test_several_culprits_are_certified_within_two_and_a_half_updates(others, dtype, share):
    found = certify_unrepeatable("plain", dtype, share, 10.0, others=others)
    assert problems(found) == []
    assert found["cost"] <= 2.5 * 12


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "dtype", "size", "method"),
    [
        pytest.param("fsdp2", "bfloat16", 1e3, "recompute", marks=pytest.mark.slow),
        ("fsdp1", "float32", 1e3, "recompute"),
        pytest.param("fsdp2", "bfloat16", 10.0, "subtract", marks=pytest.mark.slow),
        ("fsdp2", "bfloat16", 100.0, "swap"),
    ],
)
def test_so_it_does_on_two_ranks_and_in_half_precision(bare_world, layout, dtype, size, method):
    where = {"layout": layout, "dtype": dtype, "share": 0.01, "size": size}
    found, other = bare_world.run("tests.toy_model.scenarios.certify_unrepeatable", **where)
    assert problems(found) == [] and found == other
    assert found["method"] == method


def test_with_kernels_that_repeat_the_swap_decides_at_nine_forwards_a_micro_batch():
    found = certify_unrepeatable("plain", "float32", 0.0, 1e5)
    assert problems(found) == []
    assert found["method"] == "swap" and found["replay_difference"] == 0.0
    # shares of four micro-batches, and the certificate
    assert found["cost"] == 2 * 4 + 9


def test_where_a_tenth_does_not_decide_a_micro_batch_that_has_tokens_left_tells_what_repeats():
    model = build("tiny")
    batch = random_batch(model)
    rows = len(batch.labels) // 4
    whole = int(batch.mask[:rows].sum())
    culprits = [Token(0, 0, index) for index in range(whole)] + [Token(1, 0, 0), Token(2, 0, 0)]
    step, space = trained(batch, model=model)
    spike, prober = space.take(), Prober(step, space, Ranks())
    decided = Removal(prober, spike, 1.0, 10.0, 5.0, culprits).certify()
    assert decided.method == "recompute" and decided.verdict == "explained"
    assert decided.replay_difference is None and prober.cost == 3 * 4
    with unrepeatable(step.model, 0.001):
        close = Removal(prober, spike, 1.0, 10.0, 1.05 * decided.norm_after, culprits).certify()
    assert close.method == "recompute" and close.replay_difference > 0 and close.verdict == "explained"
    assert close.error_bound < decided.error_bound


def test_of_several_parts_the_loudest_shows_by_two_backwards_that_none_can_be_subtracted():
    batch = random_batch(build("tiny")).planted({(1, 2): 3e3, (5, 1): 1e3})
    step, space = trained(batch)
    spike, prober, measured = space.take(), Prober(step, space, Ranks()), []
    parts = [[Token(0, 0, int(batch.mask[0].sum()) + 2)], [Token(1, 0, int(batch.mask[4].sum()) + 1)]]
    before = space.norm(spike)
    known = {"parts": parts, "on_part": lambda number, *_: measured.append(number)}
    with unrepeatable(step.model, 0.1):
        found = Removal(prober, spike, 1.0, before, before / 40, sum(parts, []), **known).certify()
    assert found.method == "recompute" and prober.num_backwards == 2 + 4
    assert measured == [0], "the loudest one's norm is known all the same"


@pytest.mark.slow
def test_every_cell_keeps_its_word():
    rows = measure(seeds=2)
    assert [(row, problems(row)) for row in rows if problems(row)] == []
