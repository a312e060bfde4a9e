# SPDX-License-Identifier: Apache-2.0
"""A patch is read as make_patch.sh or git has written it, and in no other way."""

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkit.build import file_diff
from patchkit.patch import blob_id, hidden_character, parse
from patchkit.refusal import MAX_LISTED, Refusal, capped
from tests.patchkit.world import ACTOR, BASE, RESULT

TEXT = st.lists(st.sampled_from("abcde"), max_size=30).map(lambda lines: "".join(f"{line}\n" for line in lines))
GOOD = file_diff(ACTOR, BASE[ACTOR].encode(), RESULT[ACTOR].encode())
NEW = file_diff("verl/new.py", None, b"x = 1\ny = 2\n")


@settings(max_examples=100)
@given(before=TEXT, after=TEXT, context=st.sampled_from([1, 3]))
def test_forward_and_backward_are_exact(before, after, context):
    if before == after or not before or not after:
        return
    file = parse(file_diff("verl/a.py", before.encode(), after.encode(), context).encode())["verl/a.py"]
    assert file.forward(before.encode()) == after.encode() and file.backward(after.encode()) == before.encode()


def test_git_says_the_same(tmp_path):
    (tmp_path / ACTOR).parent.mkdir(parents=True)
    (tmp_path / ACTOR).write_text(BASE[ACTOR])
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=(GOOD + NEW).encode(), check=True)
    assert (tmp_path / ACTOR).read_text() == RESULT[ACTOR]
    assert (tmp_path / "verl/new.py").read_text() == "x = 1\ny = 2\n"
    found = subprocess.run(["git", "hash-object", ACTOR], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == blob_id(RESULT[ACTOR].encode())


HOSTILE = {
    "leaves the tree": GOOD.replace(ACTOR, "verl/../../etc/passwd"),
    "absolute": GOOD.replace(f"a/{ACTOR}", "a//etc/passwd").replace(f"b/{ACTOR}", "b//etc/passwd"),
    "outside verl": GOOD.replace(ACTOR, "setup.py"),
    "what a run locks": GOOD.replace(ACTOR, "verl/version/version"),
    "git's own": GOOD.replace(ACTOR, "verl/.git/config"),
    "git's own on Windows": GOOD.replace(ACTOR, "verl/GIT~1/config"),
    "a device": GOOD.replace(ACTOR, "verl/aux.py"),
    "a quoted name": GOOD.replace(f"a/{ACTOR} b/{ACTOR}", '"a/verl/\\n.py" "b/verl/\\n.py"'),
    "a link": NEW.replace("100644", "120000"),
    "a submodule": NEW.replace("100644", "160000"),
    "a mode": GOOD.replace(" 100644\n", " 100755\n"),
    "a change of mode": GOOD.replace("index ", "old mode 100644\nnew mode 100755\nindex "),
    "a deletion": GOOD.replace("index ", "deleted file mode 100644\nindex "),
    "a rename": GOOD.replace("index ", "rename from verl/a\nrename to verl/b\nindex "),
    "a binary": GOOD[: GOOD.index("--- ")] + "GIT binary patch\nliteral 1\nIcmZPo000310RR91\n\n",
    "two names": GOOD.replace(f"+++ b/{ACTOR}", "+++ b/verl/b.py"),
    "new, and not": NEW.replace("--- /dev/null", "--- a/verl/new.py"),
    "another id": GOOD.replace(blob_id(RESULT[ACTOR].encode()), "0123456"),
    "a hunk too short": GOOD.removesuffix("actor line 13\n").removesuffix(" "),
    "a hunk too long": GOOD + " more\n",
    "a hunk that ends elsewhere": GOOD.replace("+8,7", "+9,7"),
    "a hunk without a line around it": file_diff(ACTOR, b"a\n", b"a\nb\n", 0),
    "a hidden character": GOOD.replace("hook", "ho\u202eok"),
    "CRLF": GOOD.replace("\n", "\r\n"),
    "a byte order mark": "\ufeff" + GOOD,
    "a part that git would not read": "--- a/x\n+++ b/x\n" + GOOD,
    "junk behind": GOOD + "junk\n",
    "twice": GOOD + GOOD,
    "twice but for case": GOOD + GOOD.replace("dp_actor", "DP_Actor"),
    "a file and a folder": NEW + NEW.replace("new.py", "new.py/a.py"),
    "nothing": "",
    "no diff": "hello\n",
    "a context diff": "*** a/x\n--- b/x\n***************\n",
    "no newline": GOOD[:-1],
    "no newline, and says so": GOOD + "\\ No newline at end of file\n",
}  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_anything_else_is_refused(text):
    with pytest.raises(Refusal) as refusal:
        file = next(iter(parse(HOSTILE[text].encode()).values()))
        file.forward(None if file.before is None else BASE[ACTOR].encode())
    assert refusal.value.code == 3


def test_a_hunk_applies_at_its_own_line_alone():
    file = parse(GOOD.encode())[ACTOR]
    with pytest.raises(Refusal, match="hunk 1 of .* does not fit at line 8"):
        file.forward(b"one line more\n" + BASE[ACTOR].encode())
    with pytest.raises(Refusal, match="would not become what the patch promises"):
        file.forward(BASE[ACTOR].replace("line 39", "line x").encode())


def test_a_list_is_cut_where_it_is_too_long_and_a_hidden_character_is_named():
    lines = [f"{number}" for number in range(MAX_LISTED)]
    assert capped(lines) == lines and capped(iter([*lines, "a", "b"])) == [*lines, "... and 2 more"]
    assert hidden_character("a\u202eb") == "U+202E" and hidden_character("plain\ttext é") is None
