# SPDX-License-Identifier: Apache-2.0
"""What a patch may hold, and what is said where it does not fit; that it leads there and back is in test_roundtrip."""

from dataclasses import replace

import pytest

from patchkit.errors import IntegrityError
from patchkit.patch.language import MAX_PREAMBLE_LINES, Hunk, apply_hunks, forward, parse
from tests.patchkit import world
from tests.patchkit.world import ACTOR, BASE, RESULT

TEXT = world.numbered("line", 30)


def section(after: str):
    (file,) = parse(world.seam(ACTOR, TEXT, after).encode())
    return file


LONGER = section(TEXT.replace("line line 10\n", "line line 10\nnew\n"))


def test_a_result_that_is_not_the_promised_one_is_refused():
    with pytest.raises(IntegrityError, match=r"would not become what the patch promises"):
        forward(replace(LONGER, after=LONGER.before), TEXT.encode())


@pytest.mark.parametrize(("number", "is_read"), [(MAX_PREAMBLE_LINES, True), (MAX_PREAMBLE_LINES + 1, False)])
def test_a_preamble_has_at_most_so_many_lines(number, is_read):
    text = ("words\n" * number + world.seam(ACTOR, BASE[ACTOR], RESULT[ACTOR])).encode()
    if is_read:
        assert parse(text)[0].hunks[0].line == number + 5
        return
    with pytest.raises(IntegrityError) as refused:
        parse(text)
    assert refused.value.reason == "patch-dialect" and refused.value.data["line"] == number


@pytest.mark.parametrize(
    ("there", "line", "found"),
    [
        (TEXT.replace("line line 12\n", "other\n"), 12, "other"),
        (TEXT[: TEXT.index("line line 12")], 12, "the file's end"),
    ],
)
def test_a_hunk_that_does_not_fit_is_told_by_its_line_and_what_stands_there(there, line, found):
    with pytest.raises(IntegrityError, match=f"hunk 1 of {ACTOR} does not fit at line {line}") as refused:
        forward(LONGER, there.encode())
    assert refused.value.data == {"expected": "line line 12", "hunk": 1, "line": line, "found": found}


@pytest.mark.parametrize("num_trailing", [0, 2])
def test_a_hunk_of_little_context_stands_at_the_file_s_end_alone(num_trailing):
    lines = TEXT.splitlines(keepends=True)
    file = section("".join([*lines[: len(lines) - num_trailing], "new\n", *lines[len(lines) - num_trailing :]]))
    with pytest.raises(IntegrityError, match="less than three lines of context"):
        apply_hunks(ACTOR, file.hunks, (TEXT + "more\n").encode())


def test_an_empty_side_of_a_hunk_begins_behind_the_line_that_it_is_written_with():
    assert Hunk(3, ("a",), 2, (), 0, 0, 1).starts == (3, 3)
    assert Hunk(2, (), 3, ("a",), 0, 0, 1).starts == (3, 3)
