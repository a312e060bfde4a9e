# SPDX-License-Identifier: Apache-2.0
"""What a patch may hold, and that each section leads to its result and back, with its hunks or with its cuts alone."""

from dataclasses import replace

import pytest

from patchkit.errors import IntegrityError
from patchkit.patch.language import MAX_PREAMBLE_LINES, apply_hunks, backward, cuts, forward, parse
from tests.patchkit import world
from tests.patchkit.world import ACTOR, BASE, RESULT

TEXT = world.numbered("line", 30)
CHANGES = {
    "a line more": TEXT.replace("line line 10\n", "line line 10\nnew\n"),
    "a line less": TEXT.replace("line line 10\n", ""),
    "its first line": "first\n" + TEXT,
    "its last line": TEXT + "last\n",
    "without its first and last": TEXT[TEXT.index("\n") + 1 : TEXT.rindex("line line 30")],
    "two places": TEXT.replace("line line 3\n", "").replace("line line 20\n", "a\nb\nc\n"),
    "two in one hunk": TEXT.replace("line line 10\n", "ten\n").replace("line line 13\n", "a\nb\n"),
    "all of it": "other\n" * 9,
}


def section(before: str, after: str):
    (file,) = parse(world.seam(ACTOR, before, after).encode())
    return file


@pytest.mark.parametrize("after", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_section_leads_to_its_result_and_back(after, is_reversed):
    before, after = (after, TEXT) if is_reversed else (TEXT, after)
    file = section(before, after)
    assert forward(file, before.encode()) == after.encode()
    assert backward(file, after.encode()) == before.encode()
    assert backward(replace(file, hunks=(), cuts=cuts(file)), after.encode()) == before.encode()
    with pytest.raises(IntegrityError, match=r"would not become what the patch promises"):
        forward(replace(file, after=file.before), before.encode())


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
    file = section(TEXT, CHANGES["a line more"])
    with pytest.raises(IntegrityError, match=f"hunk 1 of {ACTOR} does not fit at line {line}") as refused:
        forward(file, there.encode())
    assert refused.value.data == {"expected": "line line 12", "hunk": 1, "line": line, "found": found}


def test_a_hunk_of_little_context_stands_at_the_file_s_end_alone():
    file = section(TEXT, CHANGES["its last line"])
    with pytest.raises(IntegrityError, match="less than three lines of context"):
        apply_hunks(ACTOR, file.hunks, (TEXT + "more\n").encode())
