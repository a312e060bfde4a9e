# SPDX-License-Identifier: Apache-2.0
"""What a page shows, carries, leaves out and shades of a sequence."""

import random

import pytest

from gradloc.record import Culprit
from gradloc.record.bundle import Sequence
from gradloc.record.reading import read
from gradloc.report.runs import tokens
from gradloc.report.runs.tokens import shade
from tests.report.builder import make_culprit, make_sequence

KINDS = ("shown", "fold", "absent")


def sequence(num: int = 8, **changes) -> Sequence:
    made = make_sequence(num, **{name: values for name, values in changes.items() if name != "tokens"})
    return read(Sequence, made | {name: changes[name] for name in {"tokens"} & {*changes}})


def culprit(position: int) -> Culprit:
    return read(Culprit, make_culprit(position))


@pytest.mark.parametrize(
    ("num", "place", "pieces"),
    [
        (8, 3, "shown 0-8"),
        (2000, 1000, "fold 0-940, shown 940-1061, fold 1061-2000"),
        (30000, 15000, "absent 0-12891, fold 12891-14940, shown 14940-15061, fold 15061-17110, absent 17110-30000"),
    ],
    ids=["whole", "folded", "more than a page carries"],
)
def test_a_sequence_is_shown_around_its_own_culprit(num, place, pieces):
    stranger = read(Culprit, make_culprit(5, rank=0))
    own = tokens.by_sequence([culprit(place), stranger])[tokens.place(sequence(num))]
    made = tokens.view(sequence(num), own, limit=5000, shown=500)
    assert ", ".join(f"{piece.kind} {piece.start}-{piece.end}" for piece in made.pieces) == pieces
    assert made.culprits == [place]


def test_pieces_cover_every_token_once_and_every_culprit_shows():
    for source in map(random.Random, range(30)):
        num = source.randint(1, 3000)
        ids = [source.choice([1, 1, 1, 1, 2]) for _ in range(num)]
        places = sorted(source.sample(range(num), min(source.randint(0, 6), num)))
        limit, shown = source.randint(50, 3000), source.randint(20, 800)
        made = tokens.view(sequence(num, token_ids=ids), [culprit(p) for p in places], limit=limit, shown=shown)
        of = {kind: {i for p in made.pieces if p.kind == kind for i in range(p.start, p.end)} for kind in KINDS}
        assert [i for piece in made.pieces for i in range(piece.start, piece.end)] == list(range(num))
        carried = {i for start, end in made.carried for i in range(start, end)}
        assert set(places) <= of["shown"] and of["fold"] <= carried and len(carried) <= limit


def test_more_culprits_than_room_show_the_first_ones():
    assert tokens.around(list(range(0, 100, 2)), 1000, 3, reach=60) == [(0, 1), (2, 3), (4, 5)]


def test_a_sequence_without_tokens_or_text_is_no_obstacle():
    assert tokens.view(sequence(0, token_ids=[], tokens=[]), [], 100, 100).pieces == []
    for lacking, said in ({"tokens": None}, "<1002> "), ({"tokens": None, "token_ids": None}, "<position 2> "):
        found = sequence(20, **lacking)
        made = tokens.view(found, [culprit(1)], 100, 100)
        shown = tokens.payload(made, 0, shade([found]))["parts"][0]["t"]
        assert shown[1:3] == ["<1001> ", said], "a culprit's id is known from the event"


def test_the_share_shades_when_measured_and_the_coefficient_when_not():
    assert shade([sequence()])[0].name == "share"
    assert shade([sequence(share=None)])[0].name == "coefficient"


def test_levels_keep_sign_scale_what_is_not_a_number_and_the_sequence_s_length_and_do_not_blow_up_noise():
    shares = [1.0, -1.0, 0.25, 0.0, float("inf"), float("nan"), 0.01, -0.0001]
    found = shade([sequence(10, share=shares), sequence(4, share=None)])[0]
    assert found.levels == ["uapkzzlk--", "----"]
    assert found.ends == ("-100%", "100%")
    noise = shade([sequence(4, log_prob=[-1.0] * 4, rollout_log_prob=[-1.0001] * 4)])
    assert next(s for s in noise if s.name == "gap").levels == ["kkkk"]


def test_the_payload_holds_what_the_script_needs_and_packs_constant_arrays():
    errors = [0.01, 0.0, 0.02, 0.03] * 2
    found = sequence(8, advantage=[0.5] * 8, share=[float("inf")] * 8, share_error=errors)
    made = tokens.view(found, [culprit(3)], 100, 100)
    packed = tokens.payload(made, 0, shade([found]))
    part = packed["parts"][0]
    assert (packed["n"], packed["c"], part["a"]) == (8, [3], 0)
    assert (part["v"]["advantage"], part["v"]["share"], part["v"]["share_error"]) == (0.5, "∞", errors)
    assert len(part["t"]) == len(part["i"]) == len(part["l"]["advantage"]) == 8


def test_turns_are_marked_and_what_a_tool_answered_is_told_apart():
    made = tokens.view(sequence(9, response_mask=(1, 1, 1, 0, 0, 0, 1, 1, 1)), [], 100, 100)
    assert made.turns == {0: 1, 6: 2} and made.left_out == {3, 4, 5}
    whole = tokens.view(sequence(8, response_mask=(1, 1, 1, 0, 1, 1, 0, 0)), [], 100, 100)
    assert whole.turns == {} and not whole.left_out, "a single token that is left out, and padding, are no answer"
